"""``tools/drafters_wide.py``: the rest after the round that warms up."""

from kvasir import LLM, SamplingParams
from tools.drafters_wide import rest

PROMPT = [{"prompt_token_ids": [5, 17, 3, 88]}]


def test_a_rest_reads_the_step_that_a_stop_token_left_in_flight(monkeypatch):
    with LLM("nano", num_threads=1, max_model_len=64, num_pages=16, overlap=True) as llm:
        first = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False))
        stop = first[0].outputs[0].token_ids[1]
        llm.generate(
            PROMPT,
            SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=(stop,), ignore_eos=True, detokenize=False),
        )
        captured = []
        monkeypatch.setattr(llm.engine.runner, "capture_next", lambda: len(captured) < 3 and not captured.append(1))
        assert llm.engine.num_in_flight == 1 and not llm.engine.idle(), "nothing is captured over a step in flight"
        rest(llm)
        assert llm.engine.num_in_flight == 0 and len(captured) == 3
