"""Verification is sampling: with any draft, chain or tree, right or wrong, the output equals plain decoding."""

from __future__ import annotations

import random

import pytest

from kvasir.decoding.grammar import GrammarCompiler
from kvasir.decoding.sampler import MASKED_ERROR, Sampler
from kvasir.types import Grammar
from tests.decoding.helpers import EOS, TableModel, byte_tokenizer, decode, decode_span, sequence, step

V = 24
LENGTH = 30
KINDS = {
    "greedy": dict(temperature=0),
    "plain": {},
    "filters": dict(temperature=1.4, top_k=9, top_p=0.9, min_p=0.02),
    "repetition": dict(repetition_penalty=1.6, temperature=0),
    "frequency": dict(frequency_penalty=0.9, presence_penalty=0.6),
    "negative penalties": dict(frequency_penalty=-0.4, temperature=0),
    "min_tokens": dict(min_tokens=17, stop_token_ids=[2, 5, 9], temperature=1.5),
    "min_tokens, eos ignored": dict(min_tokens=9, ignore_eos=True, stop_token_ids=[2, 5]),
    "min_tokens, a model that wants to end": dict(min_tokens=13, logit_bias={EOS: 6.0}),
    "bad words": dict(bad_words=[[3], [5, 6], [7, 8, 9], [10, 10]], temperature=1.2),
    "bias": dict(logit_bias={4: 3.0, 5: -100.0}, logprobs=2),
    "allowed": dict(allowed_token_ids=[1, 4, 5, 6, 7, 8], logprobs=1, logprobs_mode="processed"),
}


def chain(right, rng, wrong=0.35):
    """Propose what plain decoding will give, with some wrong tokens, of random length."""

    def draft(seq):
        tokens = right[seq.num_output : seq.num_output + rng.randrange(6)]
        return [rng.randrange(1, V) if rng.random() < wrong else t for t in tokens], None

    return draft


def tree(right, rng):
    """Propose a random tree of up to 9 nodes with siblings and duplicates, some of them on the accepted path."""

    def draft(seq):
        tokens, parents, depth = [], [-1], [0]
        for node in range(1, rng.randrange(2, 10)):
            parent = rng.choice([node - 1, rng.randrange(node)])
            at = seq.num_output + depth[parent]
            tokens.append(right[at] if at < len(right) and rng.random() < 0.6 else rng.randrange(1, V))
            parents.append(parent)
            depth.append(depth[parent] + 1)
        return tokens, parents

    return draft


def sampler(vocab=V):
    return Sampler(vocab, vocab, 1, "cpu", (EOS,))


@pytest.mark.parametrize("shape", [chain, tree])
@pytest.mark.parametrize("kind", KINDS)
def test_any_draft_gives_the_plain_output(kind, shape):
    saved = 0
    for salt in range(6):
        model = TableModel(V, seed=salt)
        plain, error, steps = decode(sampler(), model, sequence(0, seed=salt, **KINDS[kind]), LENGTH)
        assert error is None and plain
        drafted, error, fewer = decode(
            sampler(), model, sequence(0, seed=salt, **KINDS[kind]), LENGTH, shape(plain, random.Random(salt))
        )
        assert drafted == plain and error is None
        saved += steps - fewer
    assert saved > 0, "no draft was ever accepted: the test shows nothing"


def test_a_perfect_draft_is_accepted_whole():
    model = TableModel(V)
    plain, _, _ = decode(sampler(), model, sequence(0, ignore_eos=True), LENGTH)
    drafted, _, steps = decode(
        sampler(),
        model,
        sequence(0, ignore_eos=True),
        LENGTH,
        lambda seq: (plain[seq.num_output : seq.num_output + 4], None),
    )
    assert drafted == plain and steps == LENGTH // 5


def test_logprobs_follow_the_path():
    model, s = TableModel(V), sampler()
    plain, _, _ = decode(sampler(), model, sequence(0, logprobs=3, repetition_penalty=1.3), 4)
    seq = sequence(0, logprobs=3, repetition_penalty=1.3)
    s.open(seq)
    seq.draft = plain[:2] + [(plain[2] + 1) % V]
    [result] = step(s, model, [decode_span(seq)])
    assert result.tokens == plain[:3] and [e.id for e in result.logprobs] == plain[:3]
    seq = sequence(0, logprobs=3, repetition_penalty=1.3)
    s.open(seq)
    for token, entry in zip(plain[:3], result.logprobs):
        [single] = step(s, model, [decode_span(seq)])
        assert single.tokens == [token] and single.logprobs == [entry]
        seq.tokens.append(token)
        s.accepted(seq, [token])


@pytest.mark.parametrize(
    "parents,draft,want",
    [
        ([-1, 0, 0, 0], [5, 5, 5], 2),  # duplicates: any one of them will do
        ([-1, 0, 1, 0, 3], [9, 5, 5, 6], 3),  # the second branch is the right one
        ([-1] + [0] * 20, [t for t in range(20)], 2),  # fan-out over the vocabulary
        ([-1, 0, 1], [6, 5], 1),  # the right token under the wrong parent
    ],
)
def test_hostile_trees(parents, draft, want):
    """A model that draws 5 after any prompt, then 6, 7, ..."""
    import torch

    s = sampler()
    seq = sequence(0, temperature=0)
    seq.draft = draft
    s.open(seq)
    span = decode_span(seq, parents)
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    logits = torch.zeros(len(parents), V)
    for i, d in enumerate(depth):
        logits[i, 5 + d] = 9.0
    [result] = s.sample(logits, s.pack([span])).read()
    assert result.tokens == [5, 6, 7][:want]


def test_masked_rows_past_a_wrong_draft_do_not_matter():
    """The draft token makes its own row impossible; the walk goes there only if the token was drawn."""
    model = TableModel(V)
    kind = dict(allowed_token_ids=[4, 5], bad_words=[[4, 4], [4, 5]], temperature=0)
    plain, error, _ = decode(sampler(), model, sequence(0, **kind), 12)
    drafted, also, _ = decode(sampler(), model, sequence(0, **kind), 12, lambda seq: ([4, 4], None))
    assert plain == drafted and error == also
    assert error in (None, MASKED_ERROR)


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["abc", "x"]}}, "required": ["a", "b"]}'
)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("shape", [chain, tree])
def test_with_a_grammar(shape, after, tmp_path):
    file, vocab, size = byte_tokenizer(tmp_path)
    compiler = GrammarCompiler(file, size, (EOS,))
    mark = (vocab["</think>"],) if after else ()
    matcher = compiler.compile(Grammar("json_schema", SCHEMA, after=mark))
    extra = dict(logit_bias={vocab["</think>"]: 6.0}) if after else {}
    saved = 0
    for salt in range(3):
        model = TableModel(size, seed=salt, scale=3.0)

        def seq(salt=salt):
            return sequence(0, seed=salt, matcher=matcher, grammar=Grammar("json_schema", SCHEMA, after=mark), **extra)

        plain, error, steps = decode(sampler(size), model, seq(), 60)
        assert error is None
        drafted, error, fewer = decode(sampler(size), model, seq(), 60, shape(plain, random.Random(salt)))
        assert drafted == plain and error is None
        assert decode(sampler(size), model, seq(), 60, shape(plain, random.Random(salt)), reopen_every=2)[0] == plain
        saved += steps - fewer
    assert saved > 0
