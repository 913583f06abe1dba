"""``Matcher.forced`` gives exactly the tokens that the masks force one by one, in every state of a random walk."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvasir.decoding.grammar import GrammarCompiler
from kvasir.models import checkpoint
from kvasir.types import Grammar
from tests.decoding.grammars import allowed

LONG = {
    "type": "object",
    "properties": {
        "the first long key": {"enum": ["alpha", "alphabet"]},
        "nested": {"type": "array", "items": {"const": "fixed text, é and 日本"}, "minItems": 1, "maxItems": 2},
        "optional": {"type": "integer"},
    },
    "required": ["the first long key", "nested"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(LONG)),
    Grammar("json_object", ""),
    Grammar("regex", "hello world( and more of it)?"),
    Grammar("regex", "(abc|abcdef)(ghi)*"),
    Grammar("choice", json.dumps(["the same beginning, one end", "the same beginning, two ends"])),
    Grammar("lark", 'start: "<a>" inner "</a>"\ninner: /[0-9]{1,3}/ | "fixed, fixed" | start'),
]


@pytest.fixture(scope="module")
def base():
    folder = Path(checkpoint.resolve("base"))
    config = json.loads((folder / "config.json").read_text())
    return GrammarCompiler(folder / "tokenizer.json", config["vocab_size"], (config["eos_token_id"],))


def by_masks(matcher, size: int, eos: int) -> list[int]:
    """The tokens that the masks force, one by one."""
    walker, run = matcher.copy(), []
    while len(choices := allowed(walker, size)) == 1 and choices[0] != eos:
        run += choices
        assert walker.accept(choices)
    return run


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: f"{g.kind}-{g.text[:12]}")
def test_runs_are_what_the_masks_force(grammar, base):
    size, [eos] = base.vocab_size, base.eos_ids
    runs, start = 0, base.compile(grammar)
    for seed in range(4):
        rng, matcher = random.Random(seed), start.copy()
        for _ in range(40):
            forced = matcher.forced()
            assert forced == by_masks(matcher, size, eos)
            runs += bool(forced)
            token = rng.choice(allowed(matcher, size))
            if token == eos:
                break
            assert matcher.accept([token])
    assert runs or grammar.kind == "json_object"


def test_nothing_is_forced_before_the_grammar_starts(base):
    matcher = base.compile(Grammar("regex", "all of it is fixed", after=(5, 6)))
    assert matcher.forced() == []
    assert matcher.accept([9, 5, 6]) and matcher.forced() == by_masks(matcher, base.vocab_size, base.eos_ids[0]) != []
