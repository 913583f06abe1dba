"""Grammars beside everything else that rules out tokens: the grammar wins or the request fails by name, in every way to
run steps alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvasir.client.admission import admit
from kvasir.decoding.grammar import GrammarCompiler
from kvasir.decoding.processor import PACKAGE, Processor
from kvasir.models import checkpoint
from kvasir.technique import load
from kvasir.types import Grammar, ProcessorParams, SamplingParams, Thinking
from tests.engine.driver import Driver

FILE = checkpoint.resolve("nano") / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
SIZE = TOKENIZER.get_vocab_size()
MARK = 400  # ends the thinking of the requests that think
NEVER = 22  # a spare token: none of the grammars allows it
KEYS = {"the first rather long key": {"enum": ["alpha", "beta"]}, "another key": {"type": "boolean"}}
OBJECT = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}

YES = Grammar("choice", '["yes"]')
A = Grammar("regex", "a")
LETTERS = Grammar("regex", "[a-z]{3,8}")
SCHEMA = Grammar("json_schema", json.dumps(OBJECT))


def one(text: str) -> int:
    """The id of a text that is one token."""
    [token] = encode(text)
    return token


@pytest.fixture(scope="module")
def eos():
    driver = Driver()
    found = driver.engine.info.eos_ids
    driver.close()
    return found


def starts(grammar: Grammar) -> list[int]:
    """The tokens that a grammar allows first."""
    mask = np.zeros(-(-SIZE // 32), np.int32)
    assert GrammarCompiler(FILE, SIZE, (2,)).compile(grammar).copy().fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def contrary(**options) -> list[ProcessorParams]:
    """The processor of ``contrary.py``."""
    settings = ",".join(f"{name}={value}" for name, value in options.items())
    return [ProcessorParams(f"{Path(__file__).with_name('contrary.py')}:{settings}", {}, None)]


def budget(tokens: int) -> list[ProcessorParams]:
    """Thinking that ends after so many tokens."""
    spec, inside = f"budget:max_thinking={tokens},num_ignore=0", Thinking((399,), (MARK,), "inside", "</t>")
    return [ProcessorParams(spec, load(PACKAGE, spec, Processor).prepare(encode, inside), inside)]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def thinking(grammar: Grammar) -> Grammar:
    return Grammar(grammar.kind, grammar.text, (MARK,))


# The request's parameters, and the parameter that its error names (None: its output ends, and satisfies the grammar).
CASES = {
    "a bias against the end": lambda eos: (dict(grammar=YES, logit_bias={i: -100.0 for i in eos}), None),
    "a bias for the end": lambda eos: (dict(grammar=LETTERS, logit_bias={i: 100.0 for i in eos}), None),
    "a bias against all that is allowed": lambda eos: (
        dict(grammar=YES, logit_bias={i: -100.0 for i in starts(YES)}),
        None,
    ),
    "a bias for what is not": lambda eos: (dict(grammar=SCHEMA, logit_bias={NEVER: 100.0, one("a"): 100.0}), None),
    "allowed tokens without an end": lambda eos: (
        dict(grammar=YES, allowed_token_ids=(*starts(YES), *encode("yes"))),
        None,
    ),
    "allowed tokens that are not": lambda eos: (dict(grammar=YES, allowed_token_ids=(NEVER,)), "allowed_token_ids"),
    "allowed tokens for the beginning": lambda eos: (
        dict(grammar=Grammar("regex", "ab"), allowed_token_ids=(one("a"), *eos)),
        "allowed_token_ids",
    ),
    "a bad word of several": lambda eos: (dict(grammar=Grammar("choice", '["yes", "no"]'), bad_words=("yes",)), None),
    "a bad word that must be": lambda eos: (dict(grammar=A, bad_words=("a",)), "bad_words"),
    "a bad word in forced text": lambda eos: (
        dict(grammar=Grammar("regex", "[ab]{2} the whole (tail)"), bad_words=(" the", " whole", " t", " w")),
        "bad_words",
    ),
    "least tokens after the end": lambda eos: (dict(grammar=YES, min_tokens=30), None),
    "least tokens of a schema": lambda eos: (dict(grammar=SCHEMA, min_tokens=59), None),
    "least tokens of letters": lambda eos: (dict(grammar=LETTERS, min_tokens=8), None),
    "least tokens and allowed ones": lambda eos: (
        dict(grammar=Grammar("regex", "ab?"), min_tokens=5, allowed_token_ids=(one("a"), *eos)),
        None,
    ),
    "least tokens and a bad word": lambda eos: (
        dict(grammar=Grammar("regex", "ab?"), min_tokens=5, bad_words=("b", "ab")),
        None,
    ),
    "a forced token that is not allowed": lambda eos: (
        dict(grammar=Grammar("regex", "[a-z ]{30,60}"), processors=contrary(push=NEVER, at=1)),
        "grammar",
    ),
    "a forced token after the end": lambda eos: (dict(grammar=A, processors=contrary(push=NEVER, at=1)), None),
    "a forced token instead of a forced one": lambda eos: (
        dict(grammar=SCHEMA, processors=contrary(push=NEVER, at=4)),
        "grammar",
    ),
    "a processor against the end": lambda eos: (dict(grammar=A, processors=contrary(ban=eos[-1])), None),
    "a processor against what must be": lambda eos: (dict(grammar=A, processors=contrary(ban=one("a"))), "processors"),
    "an exchange of the end for what is allowed": lambda eos: (
        dict(grammar=LETTERS, processors=contrary(token=eos[-1], other=one("e"))),
        None,
    ),
    "an exchange for what is not": lambda eos: (
        dict(grammar=A, processors=contrary(token=one("a"), other=NEVER)),
        None,
    ),
    "an exchange in forced text": lambda eos: (
        dict(grammar=SCHEMA, processors=contrary(token=one("t"), other=NEVER)),
        None,
    ),
    "an exchange for nothing": lambda eos: (dict(grammar=A, processors=contrary(token=one("a"))), "processors"),
    "penalties": lambda eos: (dict(grammar=SCHEMA, repetition_penalty=2.0, frequency_penalty=2.0), None),
    "several outputs": lambda eos: (dict(grammar=SCHEMA, min_tokens=50, n=3), None),
    "thinking": lambda eos: (dict(grammar=thinking(SCHEMA), processors=budget(6)), None),
    "thinking and least tokens": lambda eos: (dict(grammar=thinking(YES), processors=budget(6), min_tokens=50), None),
    "thinking and a bias": lambda eos: (
        dict(grammar=thinking(SCHEMA), processors=budget(6), logit_bias={i: 100.0 for i in (*eos, NEVER)}),
        None,
    ),
    "thinking and allowed tokens": lambda eos: (
        dict(grammar=thinking(YES), processors=budget(6), allowed_token_ids=(MARK, 500, *starts(YES), *encode("yes"))),
        None,
    ),
    "thinking and a bad word": lambda eos: (
        dict(grammar=thinking(A), processors=budget(6), bad_words=("a",)),
        "bad_words",
    ),
}
HOW = {
    "alone": dict(overlap=False),
    "overlap": dict(overlap=True),
    "graphs": dict(overlap=True, static=True),
    "few rows": dict(max_num_batched_tokens=9),
    "drafter": dict(drafter="ngram:min_match=1", draft_control="fixed"),
    "recycling": dict(drafter="token_recycling", draft_control="fixed"),
    "static drafter": dict(drafter="suffix:min_match=1", draft_control="fixed", static=True),
}


def fleet(driver: Driver, eos: tuple[int, ...]):
    for seed in range(2):
        for name, case in CASES.items():
            params = dict(case(eos)[0])
            processors = params.pop("processors", [])
            usual = dict(temperature=1.0, max_tokens=60, seed=seed)
            request = admit(
                [300 + (7 * seed + 3 * j) % 900 for j in range(8)],
                SamplingParams(**{**usual, **params}),
                driver.engine.info,
                id=f"{name}/{seed}",
                arrival=0.0,
                encode=encode,
            )
            request.processors = processors
            yield request


def outcome(driver: Driver) -> dict:
    found = {key: (out.tokens, out.finish_reason) for key, out in driver.outputs.items()}
    errors = {name: (event.status, event.code, event.param, event.message) for name, event in driver.errors.items()}
    return {"outputs": {key: out for key, out in found.items() if key[0] not in errors}, "errors": errors}


@pytest.fixture(scope="module")
def plain(eos):
    """Outcomes of each request alone, one token a step."""
    driver = Driver(overlap=False)
    driver.engine.proposals.forcing.wanted = lambda drafting: False
    for request in fleet(driver, eos):
        driver.run([request])
    found = outcome(driver)
    driver.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_grammar_wins_or_the_request_fails_by_name(name, plain, eos):
    params, param = CASES[name](eos)
    grammar = params["grammar"]
    matcher = GrammarCompiler(FILE, SIZE, eos).compile(grammar)
    for seed in range(2):
        request = f"{name}/{seed}"
        if param is not None:
            status, code, at, message = plain["errors"][request]
            assert status == 400 and code == ("grammar_error" if param == "grammar" else "no_token_allowed")
            assert at == param and param in message
            continue
        assert request not in plain["errors"], plain["errors"].get(request)
        outputs = [out for (id, _), out in plain["outputs"].items() if id == request]
        assert len(outputs) == params.get("n", 1)
        for tokens, reason in outputs:
            state = matcher.copy()
            assert reason == "stop" and state.accept(tokens) and tokens[-1] in eos, TOKENIZER.decode(tokens)


@pytest.mark.parametrize("how", HOW)
def test_every_way_to_run_steps_agrees(how, plain, eos):
    driver = Driver(**HOW[how])
    driver.engine.proposals.forcing.times.ended = lambda step, now: (
        None
    )  # chains by their share, not by this machine's speed
    driver.run(list(fleet(driver, eos)), gap=1)
    assert outcome(driver) == plain
    driver.close()


def test_least_tokens_hold_back_the_end_while_anything_else_is_allowed(plain, eos):
    """And no longer: a grammar that allows eight letters at most ends."""
    for seed in range(2):
        tokens, _ = plain["outputs"][f"least tokens of letters/{seed}", 0]
        assert len(TOKENIZER.decode(tokens[:-1])) == 8 or len(tokens) > 8
        assert plain["outputs"][f"least tokens and allowed ones/{seed}", 0][0][:-1] == [one("a")]


def test_a_stop_token_that_must_be_does_not_end_too_early(eos):
    """``min_tokens`` gives way to a stop token before it gives way to the end."""
    driver = Driver()
    [a, b] = one("a"), one("b")
    grammar = Grammar("regex", "(a|b)+")
    request = driver.request(
        "r",
        [300, 301],
        grammar=grammar,
        stop_token_ids=(a, b),
        min_tokens=5,
        allowed_token_ids=(a, b, *eos),
        max_tokens=20,
    )
    driver.run([request])
    assert not driver.errors and len(driver.outputs["r", 0].tokens) == 5
    assert driver.outputs["r", 0].finish_reason == "stop" and set(driver.outputs["r", 0].tokens) <= {a, b}
    driver.close()


def test_ends_that_are_ignored_are_not_text(eos):
    driver = Driver()
    driver.run([driver.request("r", [300, 301], grammar=YES, ignore_eos=True, max_tokens=20)])
    tokens = driver.outputs["r", 0].tokens
    text = [token for token in tokens if token not in eos]
    assert TOKENIZER.decode(text) == "yes" and tokens[: len(text)] == text and len(tokens) == 20
    driver.close()
