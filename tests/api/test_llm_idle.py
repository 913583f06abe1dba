"""``LLM`` reads no further than the last token of its last request."""

from kvasir import LLM, SamplingParams


def test_an_engine_that_nobody_reads_further_is_idle(monkeypatch):
    """A request that ends by a stop token leaves the step in flight that was launched ahead of it. An idle engine ends
    that step, and captures."""
    prompt = [{"prompt_token_ids": [5, 17, 3, 88]}]
    how = dict(temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM("nano", num_threads=1, max_model_len=64, num_pages=16, overlap=True) as llm:
        stop = llm.generate(prompt, SamplingParams(max_tokens=4, **how))[0].outputs[0].token_ids[1]
        llm.generate(prompt, SamplingParams(max_tokens=32, stop_token_ids=(stop,), **how))
        captured = []
        monkeypatch.setattr(llm.engine.runner, "capture_next", lambda: len(captured) < 3 and not captured.append(1))
        assert llm.engine.num_in_flight == 1
        while llm.engine.idle():
            pass
        assert llm.engine.num_in_flight == 0 and len(captured) == 3
