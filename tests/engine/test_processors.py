"""Processors in the engine: tokens are those of plain decoding with the same processors, however steps are run."""

from __future__ import annotations

import pytest

from kvasir.decoding.processor import PACKAGE, Processor
from kvasir.decoding.processors.cyclic_reflex import CyclicReflex
from kvasir.technique import load
from kvasir.types import Grammar, ProcessorParams, Thinking
from tests.engine.driver import Driver, Output

START, END, END2, WAIT = 400, 401, 402, 403
WORDS = range(300, 1200, 3)  # many, so that a random model draws them
IDS = "|".join(map(str, WORDS))
WAVE = f"cyclic_reflex:amplitude=4,period=10,ids={IDS}"
TIP = f"tip:alpha=4,beta=4,ids={IDS}"
BUDGET = "budget:max_thinking=14,min_thinking=5,num_ignore=2,wait=w"
LONG = "budget:max_thinking=10,num_ignore=0,end=e"
TEXTS = {"Wait": [WAIT], "w": [WAIT, 404], "e": list(range(500, 508))}


def processor(spec: str, end: tuple[int, ...] = (END,)) -> ProcessorParams:
    thinking = Thinking((START,), end, "inside", "</t>")
    return ProcessorParams(spec, load(PACKAGE, spec, Processor).prepare(TEXTS.get, thinking), thinking)


KINDS = [
    dict(processors=[WAVE]),
    dict(processors=[WAVE], temperature=0.0, logprobs=2),
    dict(processors=[WAVE], logit_bias={END: 6.0}, logprobs=0),  # ends its thinking soon
    dict(processors=[TIP]),
    dict(processors=[TIP, WAVE], n=4),
    dict(processors=[BUDGET], logit_bias={END: 4.0}),
    dict(processors=[LONG], temperature=0.0, logprobs=1),
    dict(processors=[LONG, WAVE], repetition_penalty=1.2, n=2, logprobs=1, logprobs_mode="processed"),
    dict(top_p=0.9),
]


def fleet(driver: Driver, kinds: list[dict] = KINDS):
    for i, kind in enumerate(kinds):
        prompt = [300 + (7 * i + 3 * j) % 900 for j in range(3 + 5 * i)]
        params = dict(temperature=1.0, max_tokens=40, seed=i, ignore_eos=True) | kind
        specs = params.pop("processors", [])
        request = driver.request(f"r{i}", prompt, **params)
        request.processors = [processor(spec) for spec in specs]
        yield request


def outcome(driver: Driver) -> dict:
    assert not driver.errors
    return {key: (out.tokens, out.finish_reason, out.logprobs, out.forced) for key, out in driver.outputs.items()}


@pytest.fixture(scope="module")
def plain():
    """Outputs of each request alone, one token a step."""
    driver = Driver(overlap=False)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    for request in fleet(driver):
        driver.run([request])
    assert driver.engine.stats().forced_tokens == 0
    found = outcome(driver)
    driver.close()
    return found


HOW = {
    "alone": dict(),
    "overlap": dict(overlap=True),
    "graphs": dict(overlap=True, static=True),
    "pieces": dict(overlap=True, pieces=True),
    "few rows": dict(max_num_batched_tokens=9),
    "drafter": dict(drafter="ngram:min_match=1", draft_control="fixed"),
    "suffix": dict(drafter="suffix", draft_control="fixed", overlap=True),
    "tree": dict(drafter="token_recycling", draft_control="fixed"),
    "static drafter": dict(drafter="ngram:min_match=1", draft_control="fixed", static=True),
}


@pytest.mark.parametrize("how", HOW)
def test_tokens_and_logprobs_are_those_of_plain_decoding(how, plain):
    driver = Driver(**HOW[how])
    driver.run(list(fleet(driver)), gap=1)
    assert outcome(driver) == plain
    if how == "alone":
        assert driver.engine.stats().forced_tokens >= 8
    driver.close()


@pytest.mark.parametrize("options", [dict(max_num_batched_tokens=32), dict(overlap=True)])
def test_preemption_and_chunks_change_nothing(plain, options):
    driver = Driver(**options)
    driver.run(list(fleet(driver)), preempt_every=3)
    assert outcome(driver) == plain
    driver.close()


@pytest.mark.parametrize("given", [1, 9, 11, 17])
def test_a_replay_goes_on_where_it_was(plain, given):
    """A request that comes again with the tokens it already had, as after a crash, in any state of its processors."""
    driver = Driver(overlap=True)
    requests = list(fleet(driver))
    for request in requests:
        n = request.params.n
        request.emitted = [plain[request.id, b][0][:given] for b in range(n)]
        request.epoch = 1
        for event in driver.engine.submit(request):
            assert event.kind != "error"
        for b in range(n):
            driver.outputs[request.id, b] = Output(list(request.emitted[b]))
    while driver.engine.has_work():
        driver.step()
    assert {k: out.tokens for k, out in driver.outputs.items()} == {k: found[0] for k, found in plain.items()}
    driver.close()


def test_the_index_keeps_overlap_and_the_token_in_flight_ends_the_wave(monkeypatch, plain):
    """Negative control: without the comparison on the device, an end that the host has not read comes too late."""
    for right in (True, False):
        driver = Driver(overlap=True)
        if not right:
            monkeypatch.setattr(CyclicReflex, "ends_on", lambda self, state: -1)
        chosen = [dict(processors=[WAVE], logit_bias={END: 6.0}, temperature=1.0, seed=s) for s in range(12)]
        driver.run(list(fleet(driver, chosen)))
        assert driver.engine.runner.sampler.num_bound == 0
        found = outcome(driver)
        driver.close()
        if right:
            truth = found
            alone = Driver(overlap=False)
            alone.run(list(fleet(alone, chosen)))
            assert outcome(alone) == truth
            alone.close()
    assert found != truth


def test_an_answer_after_its_thinking_draws_as_without_processors():
    driver = Driver(overlap=True)
    [request] = fleet(driver, [dict(processors=[WAVE, TIP, LONG])])
    driver.submit(request)
    sampler, seen = driver.engine.runner.sampler, []
    while driver.engine.has_work():
        driver.step()
        seen.append((sampler.num_bound, sampler.num_following, sampler.num_forcing, sampler._num_odd))
    assert (1, 1, 1, 1) in seen and seen.index((0, 0, 0, 0)) < len(seen) - 10 and not sampler.forcing_soon
    driver.close()


def test_forced_tokens_come_in_one_step():
    for overlap in (False, True):
        driver = Driver(overlap=overlap)
        driver.run(list(fleet(driver, [KINDS[6]])))
        out = driver.outputs["r0", 0]
        assert out.tokens[10:19] == [END, *TEXTS["e"]]
        assert out.forced == list(range(10, 19)), "the mark and the text after it are marked"
        assert driver.engine.stats().forced_tokens == 9 and len(out.logprobs) == len(out.tokens)
        assert driver.engine.stats().forwards <= 40 - 9
        driver.close()


def test_kv_after_forcing_is_that_of_a_prompt_with_those_tokens():
    """A prompt that holds the forced text goes on as the answer did."""
    driver = Driver()
    driver.run(list(fleet(driver, [KINDS[6]])))
    out = driver.outputs["r0", 0].tokens
    again = driver.request("again", [300, 303, 306, *out[:19]], temperature=0.0, max_tokens=21, ignore_eos=True)
    driver.run([again])
    assert driver.outputs["again", 0].tokens == out[19:]
    driver.close()


def test_a_grammar_that_forbids_a_forced_token_fails_the_request_with_both_names():
    for overlap in (False, True):
        driver = Driver(overlap=overlap)
        grammar = Grammar("regex", "[a-z ]{30,60}")
        bad, good = fleet(driver, [dict(processors=["budget:max_thinking=3,num_ignore=0"], grammar=grammar), {}])
        driver.run([bad, good])
        assert driver.errors["r0"].status == 400
        assert "the grammar forbids" in driver.errors["r0"].message and "'budget'" in driver.errors["r0"].message
        assert len(driver.outputs["r1", 0].tokens) == 40
        driver.close()


def test_a_grammar_that_starts_after_the_thinking_follows_the_forced_end():
    driver = Driver()
    grammar = Grammar("choice", '["yes", "no"]', (END,))
    [request] = fleet(
        driver, [dict(processors=["budget:max_thinking=6,num_ignore=0"], grammar=grammar, ignore_eos=False)]
    )
    driver.run([request])
    out = driver.outputs["r0", 0]
    assert out.tokens[6] == END and out.finish_reason == "stop" and 1 <= len(out.tokens) - 8 <= 3
    driver.close()


def test_processors_are_durable():
    """A request travels to the engine's process as it is."""
    import msgspec

    driver = Driver()
    [request] = fleet(driver, [KINDS[4]])
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=type(request)).processors == request.processors
    driver.close()
