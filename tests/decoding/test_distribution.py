"""Drawn tokens follow the exact distribution, by a chi-square test. The test rejects distributions that are slightly
wrong.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvasir.decoding.sampler import Sampler
from kvasir.types import branch_stream
from tests.decoding.helpers import EOS, decode_span, processed_scalar, sequence

V = 12
DRAWS = 24_000
ROWS = 400
LOGITS = [2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, 1.0, -2.0, 0.7, -3.0, 0.2]

CASES = {
    "plain": {},
    "hot": dict(temperature=1.7),
    "cold": dict(temperature=0.6),
    "top_k": dict(top_k=4),
    "top_p": dict(top_p=0.75),
    "min_p": dict(min_p=0.15),
    "all filters": dict(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
    "penalties": dict(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
    "bias and bans": dict(
        logit_bias={8: 3.0, 0: -1.0}, allowed_token_ids=[0, 1, 2, 3, 8, 9], min_tokens=5, stop_token_ids=[2]
    ),
}


def draws(params, over="position", count=DRAWS):
    """Draw ``count`` tokens from the same logits. The noise varies by position, or by the stream of the request."""
    sampler = Sampler(V, V, ROWS, "cpu", (EOS,))
    logits = torch.tensor(LOGITS).repeat(ROWS, 1)
    seqs = [sequence(row, [3, 4], emitted=[7, 7, 0], seed=99, **params) for row in range(ROWS)]
    for seq in seqs:
        sampler.open(seq)
    batch = sampler.pack([decode_span(seq) for seq in seqs])
    counts = torch.zeros(V, dtype=torch.int64)
    for block in range(count // ROWS):
        numbers = range(block * ROWS, (block + 1) * ROWS)
        if over == "position":
            batch.rows.positions[:] = numbers
        else:
            batch.rows.streams[:] = np.array([branch_stream(5, n) for n in numbers], np.uint64).view(np.int64)
        counts += torch.bincount(torch.tensor([r.tokens[0] for r in sampler.sample(logits, batch).read()]), minlength=V)
    return counts


def expected(params):
    weights, _ = processed_scalar(LOGITS, sequence(0, [3, 4], emitted=[7, 7, 0], **params), [], (EOS,), V)
    p = torch.tensor([math.exp(w - max(weights)) for w in weights], dtype=torch.float64)
    return p / p.sum()


def p_value(counts, p):
    """Return the p-value of Pearson's chi-square. Cells expected below 5 are pooled; a forbidden token counts as
    impossible, not as a deviation."""
    assert counts[p == 0].sum() == 0, "a token outside the support was drawn"
    want = p[p > 0] * counts.sum()
    have, small = counts[p > 0].double(), want < 5
    if small.any():
        want, have = (torch.cat([x[~small], x[small].sum()[None]]) for x in (want, have))
    statistic = ((have - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("over", ["position", "stream"])
@pytest.mark.parametrize("name", ["plain", "all filters"])
def test_both_ways_of_varying_the_noise(name, over):
    assert p_value(draws(CASES[name], over), expected(CASES[name])) > 1e-3


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("plain", "all filters")])
def test_every_stage(name):
    assert p_value(draws(CASES[name]), expected(CASES[name])) > 1e-3


def test_control_a_wrong_temperature_is_rejected():
    assert p_value(draws(dict(temperature=1.0)), expected(dict(temperature=1.08))) < 1e-6


def test_control_a_wrong_penalty_is_rejected():
    assert p_value(draws(dict(presence_penalty=0.5)), expected(dict(presence_penalty=0.7))) < 1e-6


def test_control_shared_noise_is_rejected():
    """The same noise vector for every draw gives the same token every time."""
    counts = draws({}, over="position", count=2 * ROWS)
    sampler = Sampler(V, V, ROWS, "cpu", (EOS,))
    spans = []
    for row in range(ROWS):
        seq = sequence(row, [3, 4], seed=99)
        sampler.open(seq)
        spans.append(decode_span(seq))
    results = sampler.sample(torch.tensor(LOGITS).repeat(ROWS, 1), sampler.pack(spans)).read()
    shared = torch.bincount(torch.tensor([r.tokens[0] for r in results]), minlength=V)
    assert p_value(counts, expected({})) > 1e-3 and p_value(shared, expected({})) < 1e-6


def test_consecutive_tokens_are_independent():
    """Draws at neighbouring positions of one stream are independent: their joint distribution is the product."""
    sampler = Sampler(4, 4, ROWS, "cpu", ())
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5])
    p = torch.softmax(logits.double(), 0)
    pairs = torch.zeros(16, dtype=torch.int64)
    for block in range(30):
        spans = []
        for row in range(ROWS):
            seq = sequence(row, [3], seed=branch_stream(8, block * ROWS + row))
            seq.draft = [0]
            sampler.open(seq)
            spans.append(decode_span(seq))
        batch = sampler.pack(spans)
        out = sampler.sample(logits.repeat(2 * ROWS, 1), batch)
        tokens = out.draws[0].long().view(ROWS, 2)
        pairs += torch.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    assert p_value(pairs, (p[:, None] * p[None, :]).flatten()) > 1e-3
