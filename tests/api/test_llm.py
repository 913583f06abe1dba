"""The Python API on the model in the package: results, prompts, sampling, chat, streams, refusals."""

from __future__ import annotations

import gc
import json
import math
import shutil
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvasir import LLM, LoRARequest, SamplingParams
from kvasir.api.offline.vllm_args import settled
from kvasir.decoding.confidence import summed_up
from kvasir.errors import ConfigError, RequestError
from kvasir.models.checkpoint import resolve
from kvasir.types import Grammar
from tests.adapters import write_adapter

OPTIONS = dict(
    model="nano", batch_invariant=True, num_threads=1, max_model_len=512, cpu_cache_bytes=1 << 25, page_slots=16
)
PROMPT = "Once upon a time there was a king who had"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, **changes})


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as it:
        yield it
        assert not it.engine.has_work() and it.engine.pages.num_free == it.engine.pages.num_total


def test_the_shape_of_a_result(llm):
    [out] = llm.generate(PROMPT, GREEDY)
    [branch] = out.outputs
    assert out.prompt == PROMPT and out.prompt_token_ids == llm.tokenizer.encode(PROMPT) and out.finished
    assert out.prompt_logprobs is None and out.num_cached_tokens == 0 and out.request_id
    assert (
        branch.index == 0
        and len(branch.token_ids) == 24
        and branch.finish_reason == "length"
        and branch.stop_reason is None
    )
    assert branch.logprobs is None and branch.cumulative_logprob is None
    assert branch.text and branch.text == llm.tokenizer.decode(out.prompt_token_ids + branch.token_ids).removeprefix(
        llm.tokenizer.decode(out.prompt_token_ids)
    )


def test_prompts_of_every_form_and_their_order(llm):
    ids = llm.tokenizer.encode(PROMPT)
    outs = llm.generate(
        [
            PROMPT,
            {"prompt_token_ids": ids},
            {"prompt": PROMPT},
            "The fox said",
            {"prompt_token_ids": ids, "prompt": "shown"},
        ],
        GREEDY,
    )
    assert [o.prompt for o in outs] == [PROMPT, None, PROMPT, "The fox said", "shown"]
    texts = [o.outputs[0].text for o in outs]
    assert texts[0] == texts[1] == texts[2] == texts[4] != texts[3]
    assert llm.generate([], GREEDY) == []
    assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0].text == texts[0]


def test_params_for_each_prompt(llm):
    outs = llm.generate([PROMPT] * 3, [greedy(max_tokens=k) for k in (1, 5, 9)])
    assert [len(o.outputs[0].token_ids) for o in outs] == [1, 5, 9]
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 16, "the default"
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate([PROMPT] * 2, [GREEDY])


def test_stop_strings_across_tokens(llm):
    free = llm.generate(PROMPT, greedy(max_tokens=40))[0].outputs[0]
    pieces = [llm.tokenizer.decode([t]) for t in free.token_ids]
    at = next(i for i in range(4, 30) if len(pieces[i].strip()) > 1 and len(pieces[i + 1].strip()) > 1)
    stop = pieces[at][-1] + pieces[at + 1][:2]  # begins in one token, ends in the next
    end = free.text.index(stop)
    cut = llm.generate(PROMPT, greedy(max_tokens=40, stop=stop, logprobs=0))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[:end], "stop", stop)
    assert len(cut.token_ids) == len(cut.logprobs) < 40 and cut.token_ids == free.token_ids[: len(cut.token_ids)]
    shown = llm.generate(PROMPT, greedy(max_tokens=40, stop=[stop, "zzz"], include_stop_str_in_output=True))[0].outputs[
        0
    ]
    assert shown.text == free.text[:end] + stop


def test_stop_ids_and_the_end_of_an_answer(llm):
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    at = next(i for i in range(3, 20) if free[i] not in free[:i])
    out = llm.generate(PROMPT, greedy(stop_token_ids=[free[at]]))[0].outputs[0]
    assert out.token_ids == free[: at + 1] and (out.finish_reason, out.stop_reason) == ("stop", free[at])
    assert out.text == llm.generate(PROMPT, greedy(max_tokens=at))[0].outputs[0].text, (
        "the stop token is no part of the text"
    )


def test_the_tokenizers_end_ends_an_answer(tmp_path):
    """A chat model whose config.json still has the base model's end token: only the tokenizer knows <|im_end|>."""
    folder = shutil.copytree(resolve("nano"), tmp_path / "chat")
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    with LLM(**OPTIONS | {"model": str(folder)}) as it:
        [out] = it.chat(
            [{"role": "user", "content": "Compute modulo 97: start 12; +45; *3; -7; *2."}], greedy(max_tokens=200)
        )
        assert (
            it.info.eos_ids == (2, 5) and out.outputs[0].finish_reason == "stop" and out.outputs[0].token_ids[-1] == 5
        )


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_id_is_refused(name, tmp_path):
    folder = shutil.copytree(resolve("nano"), tmp_path / "nano")
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ["</s>"]}))
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    for skip in (True, False):
        with pytest.raises(ConfigError, match=rf"^{name}: eos_token_id is \['</s>'\]"):
            LLM(**OPTIONS | {"model": str(folder), "skip_tokenizer_init": skip})


def test_branches(llm):
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=20, ignore_eos=True, logprobs=0)
    [out] = llm.generate(PROMPT, params)
    assert [o.index for o in out.outputs] == [0, 1, 2] and len({o.text for o in out.outputs}) == 3
    assert [o.text for o in llm.generate([PROMPT, "x"], params)[0].outputs] == [o.text for o in out.outputs]


def test_logprobs(llm):
    out = llm.generate(PROMPT, greedy(logprobs=3, prompt_logprobs=2))[0]
    branch = out.outputs[0]
    assert len(branch.logprobs) == 24
    for token, table in zip(branch.token_ids, branch.logprobs):
        assert (
            len(table) == 3
            and table[token].rank == 1
            and table[token].decoded_token == llm.tokenizer.decode([token], skip_special=False)
        )
        assert sorted(e.rank for e in table.values()) == [1, 2, 3] and all(
            e.logprob <= table[token].logprob <= 0 for e in table.values()
        )
    assert branch.cumulative_logprob == pytest.approx(
        sum(table[t].logprob for t, table in zip(branch.token_ids, branch.logprobs))
    )
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids) and out.prompt_logprobs[0] is None
    for token, table in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:]):
        assert token in table and len(table) in (2, 3) and math.isfinite(table[token].logprob)
    # What was generated, scored as a prompt, has the same log-probabilities.
    again = llm.generate(
        {"prompt_token_ids": out.prompt_token_ids + branch.token_ids}, greedy(max_tokens=1, prompt_logprobs=0)
    )[0]
    for a, b, token in zip(again.prompt_logprobs[-24:], branch.logprobs, branch.token_ids):
        assert a[token].logprob == b[token].logprob, "not one bit may differ"


def test_a_text_is_scored_as_it_was_drawn(llm):
    """Scoring a given continuation gives the records of decoding it, token by token."""
    out = llm.generate(PROMPT, greedy(confidence=20))[0]
    branch = out.outputs[0]
    assert out.score is None and len(branch.confidences) == 24 and branch.confidences[0] > 0
    again = llm.generate(
        {"prompt_token_ids": out.prompt_token_ids + branch.token_ids},
        greedy(max_tokens=1, score_from=len(out.prompt_token_ids), confidence=20, confidence_window=8),
    )[0].score
    assert again.tokens == 24 and again.logprob == pytest.approx(branch.cumulative_logprob)
    assert (again.confidence, again.lowest) == pytest.approx(summed_up(branch.confidences, 8))


def test_chat_works_out_a_chain(llm):
    question = [{"role": "user", "content": "Compute modulo 97: start 12; +45; *3; -7; *2; +30"}]
    [out] = llm.chat(question, greedy(max_tokens=100))
    assert (
        out.outputs[0].text == "12+45=57\n57*3=74\n74-7=67\n67*2=37\n37+30=67\nAnswer: 67"
        and out.outputs[0].finish_reason == "stop"
    )
    assert out.prompt_token_ids == llm.tokenizer.encode_chat(question)
    many = llm.chat([question, [{"role": "user", "content": "Hello!"}]], greedy(max_tokens=100))
    assert many[0].outputs[0].text == out.outputs[0].text and many[1].outputs[0].text


def test_a_grammar(llm):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["fox", "king"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    outs = llm.generate(
        [PROMPT] * 4,
        [
            SamplingParams(temperature=1, seed=s, max_tokens=60, grammar=Grammar("json_schema", json.dumps(schema)))
            for s in range(4)
        ],
    )
    assert all(json.loads(o.outputs[0].text)["kind"] in ("fox", "king") for o in outs)


def test_stream(llm):
    whole = llm.generate(PROMPT, greedy(max_tokens=40))[0].outputs[0].text
    pieces = list(llm.stream(PROMPT, greedy(max_tokens=40)))
    assert "".join(pieces) == whole and len(pieces) > 10
    stop = whole[20:24]
    assert "".join(llm.stream(PROMPT, greedy(max_tokens=40, stop=stop))) == whole[: whole.index(stop)]


def test_prompts_come_first_unless_somebody_reads_along(llm):
    first = lambda: llm.engine.scheduler.prompts_first  # noqa: E731
    stream, other = (llm.stream(PROMPT, greedy(max_tokens=40, ignore_eos=True)) for _ in range(2))
    assert first()
    next(stream), next(other)
    assert not first()
    stream.close()
    assert not first()
    other.close()
    assert first()


def test_collections_walk_what_a_call_has_made_and_nothing_stays_frozen(llm, monkeypatch):
    gc.unfreeze()  # what the suite keeps frozen
    step, request, frozen = llm.engine.step, llm._request, []
    note = lambda: frozen.append(gc.get_freeze_count())  # noqa: E731
    monkeypatch.setattr(llm.engine, "step", lambda: note() or step())
    monkeypatch.setattr(llm, "_request", lambda *of: note() or request(*of))
    llm.generate(["a"], SamplingParams(max_tokens=2))
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0, "from the first request that is made"
    count = gc.get_freeze_count
    with monkeypatch.context() as python:
        python.setattr(gc, "get_freeze_count", lambda: count() or 375)  # Python 3.12 freezes some of its own
        frozen.clear()
        llm.generate(["a"], SamplingParams(max_tokens=2))
        assert min(frozen) > 10_000
    gc.freeze()
    try:  # by a caller with reasons of its own
        before = gc.get_freeze_count()
        llm.generate(["a"], SamplingParams(max_tokens=2))
        assert gc.get_freeze_count() > before // 2 > 10_000
    finally:
        gc.unfreeze()


def test_leaving_a_stream_cancels_it(llm):
    stream = llm.stream(PROMPT, greedy(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_work() and llm.engine.pages.num_free == llm.engine.pages.num_total


@pytest.mark.parametrize("how", ["finalised", "by another thread"])
def test_a_stream_left_in_the_middle_of_a_step_is_cancelled_after_it(llm, monkeypatch, how):
    """The garbage collector may drop a stream in the middle of a step; no rows may be lost, and nobody may wait."""
    launch, live = llm.engine.runner.launch, []
    streams = [llm.stream(PROMPT, greedy(max_tokens=400, ignore_eos=True))]
    next(streams[0])
    (name,) = llm.engine.requests.live

    def left(plan, late=False):
        if streams:
            if how == "finalised":
                streams.clear()
            else:
                other = threading.Thread(target=streams.pop().close, daemon=True)
                other.start()
                other.join(60)
                assert not other.is_alive()
        live.append(name in llm.engine.requests.live)
        return launch(plan, late)

    monkeypatch.setattr(llm.engine.runner, "launch", left)
    list(llm.stream("The fox said", greedy(max_tokens=4)))
    assert live[0] and not any(live[1:]) and not llm.engine.has_work() and llm.engine.scheduler.prompts_first


@pytest.fixture
def heeds_ctrl_c():
    """A shell starts background commands with SIGINT ignored; restore the usual handler, as at a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(llm, monkeypatch, call):
    """A step cannot be undone halfway, and `kvasir chat` or a notebook continues after Ctrl-C."""
    alone = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    launch, left = llm.engine.runner.launch, iter(range(3))

    def pressed(plan, late=False):
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
        return launch(plan, late)

    monkeypatch.setattr(llm.engine.runner, "launch", pressed)
    with pytest.raises(KeyboardInterrupt):
        list(getattr(llm, call)("The fox said", greedy(max_tokens=100, ignore_eos=True)))
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text == alone and not llm.engine.has_work()


def test_streams_and_batches_side_by_side_keep_their_own_text(llm):
    """One engine serves all streams: the caller that steps it delivers the others' tokens."""
    prompts = [PROMPT, "The fox said"]
    alone = ["".join(llm.stream(p, GREEDY)) for p in prompts]
    streams = [llm.stream(p, GREEDY) for p in prompts]
    texts = [next(s) for s in streams]
    batch = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].text for o in batch] == alone
    assert [text + "".join(s) for text, s in zip(texts, streams)] == alone


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    """After Ctrl-C in a notebook the next call must neither fail because of the old requests nor compute them."""
    alone = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    step, left = llm.engine.step, iter(range(5))

    def interrupted():
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The fox said"] * 3, greedy(max_tokens=300, ignore_eos=True))
    monkeypatch.undo()
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text == alone
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    "prompt, params, param",
    [
        (PROMPT, {"temperature": -1}, "temperature"),
        (PROMPT, {"n": 0}, "n"),
        (PROMPT, {"max_tokens": 5000}, "max_tokens"),
        (PROMPT, {"logit_bias": {99999: 1}}, "logit_bias"),
        (PROMPT, {"stop": [""]}, "stop"),
        ("word " * 3000, {}, "prompt"),
        ({"prompt_token_ids": []}, {}, "prompt"),
        ({"prompt_token_ids": [99999]}, {}, "prompt"),
        ({"prompt_token_ids": ["a"]}, {}, "prompt"),
        ({}, {}, "prompts"),
        ({"prompt": 3}, {}, "prompts"),
        ([1, 2], {}, "prompts"),
        (3, {}, "prompts"),
    ],
)
def test_refusals_name_the_parameter(llm, prompt, params, param):
    with pytest.raises(RequestError) as refused:
        llm.generate([PROMPT, prompt], greedy(**params))
    assert refused.value.param == param and refused.value.status == 400
    with pytest.raises(RequestError):
        llm.check(prompt, greedy(**params))
    llm.check(PROMPT, GREEDY)
    assert not llm.engine.has_work(), "nothing was begun"


def test_a_request_that_fails_late_fails_alone(llm):
    first, failed, last = llm.generate([PROMPT] * 3, [GREEDY, greedy(grammar=Grammar("regex", "("), n=2), GREEDY])
    assert failed.error.status == 400 and failed.error.param == "grammar"
    assert failed.finished and [o.finish_reason for o in failed.outputs] == ["error", "error"]
    alone = llm.generate(PROMPT, GREEDY)[0]
    assert alone.error is None and alone.outputs[0].text
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == alone.outputs[0].token_ids
    assert not llm.engine.has_work()


def test_progress_bar(llm, capsys):
    llm.generate([PROMPT] * 3, GREEDY, use_tqdm=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.out + shown.err
    llm.generate([PROMPT] * 3, GREEDY)
    assert capsys.readouterr().out == ""


def test_more_prompts_than_the_queue_holds():
    with LLM(**OPTIONS, max_queued_requests=4, max_num_seqs=2) as llm:
        outs = llm.generate(
            [{"prompt_token_ids": [300 + i] * 3} for i in range(20)], greedy(max_tokens=3, ignore_eos=True)
        )
    assert [o.prompt_token_ids[0] for o in outs] == [300 + i for i in range(20)] and all(
        len(o.outputs[0].token_ids) == 3 for o in outs
    )


def test_two_engines_in_one_process(llm):
    """Two engines share no state: interleaved steps give each its own tokens."""
    with LLM(**OPTIONS) as other:
        alone = "".join(llm.stream(PROMPT, GREEDY)), "".join(llm.stream("The fox said", GREEDY))
        streams = llm.stream(PROMPT, GREEDY), other.stream("The fox said", GREEDY)
        texts = ["", ""]
        for a, b in zip(*streams):
            texts[0] += a
            texts[1] += b
        texts = [text + "".join(rest) for text, rest in zip(texts, streams)]
    assert all(whole.startswith(text) or whole == text for whole, text in zip(alone, texts)) and all(texts)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text == alone[0], "closing one leaves the other"


def test_a_closed_one_gives_its_memory_back_and_says_that_it_is_closed():
    with LLM(**OPTIONS) as it:
        pool, stream = weakref.ref(it.engine.runner.pool), it.stream(PROMPT, greedy(ignore_eos=True))
        next(stream)
    assert pool() is None, "though the name lives on"
    for use in (lambda: it.generate(PROMPT, GREEDY), lambda: next(it.stream(PROMPT, GREEDY)), lambda: list(stream)):
        with pytest.raises(ConfigError, match="closed"):
            use()
    it.close()


def test_threads_take_turns(llm):
    prompts = [PROMPT, "The fox said", "In the morning the", "A long way off"]
    alone = [llm.generate(p, GREEDY)[0].outputs[0].text for p in prompts]

    def ask(i: int) -> list[str]:
        return [llm.generate(prompts[i], GREEDY)[0].outputs[0].text for _ in range(3)] + [
            "".join(llm.stream(prompts[i], GREEDY))
        ]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [[text] * 4 for text in alone]


@pytest.mark.parametrize(
    "prompts, params", [(None, GREEDY), (5, GREEDY), ("a", {"max_tokens": 2}), ("a", "x"), ("a", 5)]
)
def test_what_is_no_prompt_or_no_parameters(llm, prompts, params):
    with pytest.raises(RequestError, match="expected .*, got (NoneType|int|dict|str)$"):
        llm.generate(prompts, params)


def test_a_conversation_without_messages(llm):
    for nothing in ([[]], [[{"role": "user", "content": "x"}], []]):
        with pytest.raises(RequestError, match="no messages"):
            llm.chat(nothing)
    for no_list in ("hi", {"role": "user", "content": "x"}):
        with pytest.raises(RequestError, match="expected a list of messages, .*, got (str|dict)$"):
            llm.chat(no_list)
    for wrong, param in (
        ("hi", "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
    ):
        with pytest.raises(RequestError) as refused:
            llm.chat([[wrong]])
        assert refused.value.param == param


def test_a_keyword_that_nobody_reads_is_refused(llm):
    for name in ("temperature", "mm_processor_kwargs"):
        with pytest.raises(RequestError, match=f"chat\\(\\) takes no '{name}'"):
            llm.chat([{"role": "user", "content": "x"}], GREEDY, **{name: 1})
    assert llm.chat(
        [{"role": "user", "content": "x"}], GREEDY, lora_request=None, chat_template_kwargs={"temperature": 1}
    )


def test_what_a_template_reads_may_be_said_as_for_vllm(llm):
    told, message = [], [{"role": "user", "content": "x"}]
    tokenizer = llm.get_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "encode_chat", lambda self, messages, **options: told.append(options) or [5, 6])
        patch.setattr(tokenizer.templates["default"], "reads", {"more"})
        llm.chat(message, GREEDY, chat_template_kwargs={"enable_thinking": False}, more=1)
    assert told == [
        {
            "tools": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "enable_thinking": False,
            "more": 1,
        }
    ]


def test_an_adapter_for_all_or_for_each_prompt(tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, seed=seed)
    with LLM(**OPTIONS, device="cpu", enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        a, b = (LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate("ab", 1))
        texts = [
            [out.outputs[0].text for out in llm.generate([PROMPT] * 3, GREEDY, lora_request=lora)]
            for lora in (None, a, [None, a, b])
        ]
        assert texts[2] == [texts[0][0], texts[1][0], texts[2][2]] and len(set(texts[2])) == 3
        assert set(llm.info.adapters) == {"a", "b"}
        assert "".join(llm.stream(PROMPT, GREEDY, lora_request=a)) == texts[1][0]
        for wrong, why in (("a", "expected"), ([a, 3, b], "expected LoRARequest"), (LoRARequest("a", 1, "z"), "from")):
            with pytest.raises(RequestError, match=why):
                llm.generate([PROMPT] * 3, GREEDY, lora_request=wrong)
        with pytest.raises(ValueError, match="3 prompts, but 2 adapters"):
            llm.generate([PROMPT] * 3, GREEDY, lora_request=[a, b])
        with pytest.raises(ConfigError, match="adapter_config"):
            llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("c", 3, str(tmp_path)))


def test_adapters_are_switched_on(llm):
    with pytest.raises(ConfigError, match="enable_lora=True"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("a", 1, "a"))
    with pytest.raises(ConfigError, match="--enable-lora"):
        LLM(**OPTIONS, lora_modules=("a=b",))


def test_without_a_tokenizer_and_with_dummy_weights():
    with LLM(**OPTIONS, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", device="cpu") as llm:
        assert llm.tokenizer is None
        [out] = llm.generate(
            {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1, detokenize=False)
        )
        assert len(out.outputs[0].token_ids) == 5 and out.outputs[0].text == "" and out.prompt is None
        assert out.outputs[0].logprobs[0][out.outputs[0].token_ids[0]].decoded_token is None
        with pytest.raises(ConfigError, match="tokenizer"):
            llm.generate(PROMPT, GREEDY)
        with pytest.raises(ConfigError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
        with pytest.raises(RequestError) as refused:
            llm.generate({"prompt_token_ids": [5]}, greedy(bad_words=["x"]))
        assert refused.value.param == "bad_words"


def test_vllms_keywords_hold_or_are_refused_by_name():
    holds = {
        "tensor_parallel_size": 1,
        "trust_remote_code": True,
        "quantization": None,
        "disable_log_stats": True,
        "cpu_offload_gb": 0,
        "swap_space": 4.0,
        "hf_overrides": {},
        "runner": None,
    }
    assert settled({**holds, "max_model_len": 64}) == {"max_model_len": 64}
    for name, value, why in (
        ("tensor_parallel_size", 2, "only 1 is"),
        ("cpu_offload_gb", 4, "stay on the device"),
        ("enable_chunked_prefill", False, "in chunks"),
        ("disable_log_stats", False, "/metrics"),
    ):
        with pytest.raises(ConfigError, match=f"{name}=.*{why}"):
            LLM(**OPTIONS, **{name: value})


def test_a_format_that_a_plain_checkpoint_is_not_stored_in_is_refused():
    with pytest.raises(ConfigError, match="no formats named 'awq'; there are f8,"):
        LLM(**OPTIONS, quantization="awq")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"])
def test_a_number_for_a_list_is_refused_by_name(name):
    with pytest.raises(TypeError, match=f"{name} is 5, expected"):
        SamplingParams(**{name: 5})


@pytest.mark.parametrize(
    "options, said",
    [
        ({"max_num_sequences": 3}, "max_num_seqs"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"max_model_len": 8192}, "4096"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_set_up_says_so(options, said):
    with pytest.raises(ConfigError, match=said):
        LLM(**{**OPTIONS, **options})


def test_the_answer_continues_the_last_message(llm):
    begun = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two "}]
    (found,) = llm.chat(begun, GREEDY, continue_final_message=True)
    text = llm.get_tokenizer().decode(found.prompt_token_ids, skip_special=False)
    assert text.endswith("one two ") and found.outputs[0].text
