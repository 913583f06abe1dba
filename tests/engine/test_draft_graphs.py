"""Steps that verify drafts over static buffers: they compute what the plain eager step does, whatever is padded.

A backend reads the spans back from the device's numbers alone and lets the reference attend: a stand-in for the
kernels, which have tests of their own, and for the capture, which needs a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from kvasir.decoding.sampler import NUMERIC_ERROR, StepOutput
from kvasir.decoding.walk import resolve_span
from kvasir.engine.drafts.draft_times import DraftTimes
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.schedule.step_time import Roofline
from kvasir.engine.ways import graph_buckets
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.device_seats import ROW_WORDS, draft_words
from kvasir.engine.ways.graph_buckets import ROW_BY_ROW
from kvasir.engine.ways.graph_handle import DecodeHandle
from kvasir.kernels.paged_attention import spans_of
from kvasir.types import Request, SamplingParams, Sequence, Span, Status
from tests.engine.driver import Driver, use_ways
from tests.speculation.helpers import Hostile, WithGuests, driver, install, outputs, plain, requests

FORMS = (4, 16)


class FromTheDevice:
    """A backend's ``together`` over the reference: it makes one ordinary batch of what the static buffers say."""

    def __init__(self, backend) -> None:
        self._backend, self.seen = backend, []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def together(self):
        return FORMS

    def plan(self, batch) -> None:
        if batch.together is not None:
            rows = batch.together
            firsts, starts, lengths = spans_of(batch.context, rows.place, rows.length)
            assert max(lengths) <= rows.most and sum(lengths) == len(batch.input_ids)
            self.seen.append((rows.most, lengths))
            batch.scratch["plain"] = plain_batch = replace(
                batch,
                together=None,
                context=batch.context[firsts],
                starts=starts,
                lengths=lengths,
                tables=tuple(t[firsts] for t in batch.tables),
                row_start=torch.tensor([*firsts, len(batch.input_ids)], dtype=torch.int32),
                scratch={},
            )
            batch = plain_batch
        self._backend.plan(batch)

    def run(self, q_THD, cache, spec, batch, **how):
        return self._backend.run(q_THD, cache, spec, batch.scratch.get("plain", batch), **how)


def use_graphs(d: Driver, max_drafts: int = 8) -> FromTheDevice:
    parts = d.engine.runner.parts
    parts.backend = FromTheDevice(parts.backend)
    use_ways(d.engine.runner, call_through, max_drafts)
    return parts.backend


@pytest.fixture(scope="module")
def expected():
    return plain(1.0, 2)


@pytest.mark.parametrize("guests", [False, True])
@pytest.mark.parametrize(
    "params", [dict(logprobs=None), dict(repetition_penalty=1.3)], ids=["drawn within", "sampled outside"]
)
def test_same_tokens_from_static_buffers(params, guests, expected):
    """Trees, guests and decodes in one step are padded to buckets, some of them in wider forms, and preempted at
    times."""
    wanted = {
        key: tokens for key, (tokens, _) in (expected if "logprobs" in params else plain(1.0, 2, **params)).items()
    }
    d = driver("replay", max_num_batched_tokens=96, max_num_seqs=5)
    install(d, WithGuests(wanted, d.engine.runner.model.spec.hidden_size) if guests else Hostile(wanted))
    backend = use_graphs(d)
    d.run(requests(d, 1.0, 2, **params), preempt_every=7)
    assert not d.errors and {key: out.tokens for key, out in d.outputs.items()} == wanted
    assert d.engine.stats().accepted_tokens > 20 and {most for most, _ in backend.seen} >= {FORMS[1]}
    assert not guests or d.engine.proposals.drafting.drafter.heard > 10
    assert not d.engine.proposals.drafting._failures
    d.close()


def test_without_sharing_trees_are_launched_one_by_one(expected):
    """With the switch off, chains run row by row, as decodes of their own; nothing else sees the difference."""
    wanted = {key: tokens for key, (tokens, _) in expected.items()}
    with mock.patch.object(graph_buckets, "SHARE_KEYS", False):
        d = driver("replay", max_num_seqs=5)
        backend = use_graphs(d)
    install(d, Hostile(wanted))
    assert not d.engine.runner.graphs.trees
    d.run(requests(d, 1.0, 2))
    assert outputs(d) == expected and not backend.seen
    d.close()


def random_spans(d: Driver, seqs: list[Sequence], rng: random.Random) -> list[Span]:
    """A decode, a chain or a tree of each sequence, some with guests."""
    spans = []
    for seq in seqs:
        length = rng.choice([1, 1, rng.randint(2, 4), rng.randint(5, 16)])
        start, tree = seq.num_computed, rng.random() < 0.6
        seq.draft = [rng.randrange(300, 900) for _ in range(length - 1)]
        parents = [-1, *(rng.randrange(i) for i in range(1, length))] if tree and length > 2 else None
        guests = [rng.randrange(5)] * rng.randint(0, 1) if length > 1 else []
        span = Span(
            seq,
            start,
            length,
            want={"sample": range(length - len(guests)), "guess": range(length - len(guests), length)},
            commit="walk",
            parents=parents,
            seat=seq.seat,
            guests=guests,
        )
        if guests:
            seq.draft.pop()
        spans.append(span)
    return spans


def test_a_chain_of_more_rows_than_a_word_has_bits_runs_row_by_row():
    given, alone = dict(max_tokens=120, temperature=0.0, ignore_eos=True), Driver(max_num_seqs=2)
    prompt = list(range(300, 340))
    tokens = alone.run([alone.request("r", prompt, **given)])["r", 0].tokens
    d = driver("replay", max_draft_tokens=100, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=256)
    d.engine.proposals.drafting.drafter.load({tuple(prompt): tokens}, 1)
    use_graphs(d, 100)
    assert d.run([d.request("r", prompt, **given)])["r", 0].tokens == tokens
    assert d.engine.stats().accepted_tokens > 64 and d.engine.runner.graphs.choice._uses.keys() >= {
        (104, StepOutput.DRAWS, ROW_BY_ROW)
    }


def test_the_buffers_hold_what_the_eager_step_computes():
    """The same spans run both ways over the same pages, and give hidden states that are equal to the bit in exact
    mode."""
    rng = random.Random(3)
    d = driver("replay", max_num_seqs=5, max_num_batched_tokens=256, check=False, poison=False)
    engine, runner = d.engine, d.engine.runner
    runner.parts.guest_inputs = torch.randn(
        5, runner.model.spec.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    backend = use_graphs(d, 16)
    for request in [
        d.request(f"r{i}", [300 + (i + 7 * j) % 900 for j in range(9 + 11 * i)], max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]:
        d.submit(request)
    for _ in range(3):
        d.step()
    seqs = [seq for seq in engine.scheduler.running.ordered(0.0) if seq.status is Status.RUNNING]
    assert len(seqs) == 4 and all(seq.num_computed == len(seq.tokens) - 1 for seq in seqs)
    sizes = set()
    for _ in range(12):
        chosen = rng.sample(seqs, rng.randint(1, 4))
        spans = random_spans(d, chosen, rng)
        assert all(engine.scheduler.pages.grow(span.seq, span.start + span.length, []) for span in spans)
        count = sum(span.length for span in spans)
        found = runner.graphs.forward(spans).clone()
        sizes.add((runner.graphs.bucket(count), count))
        batch = runner.parts.packer.pack(spans)
        if batch.guests is not None:
            batch.inputs = runner.parts.guest_inputs.index_select(0, batch.guests[1])
        runner.parts.backend.plan(batch)
        want = runner.model.forward(batch, runner.parts.caches, runner.parts.backend)
        assert torch.equal(found, want), [(span.length, span.parents) for span in spans]
    assert any(size > count for size, count in sizes) and backend.seen
    for seq in seqs:
        seq.draft = []


def test_chains_walked_at_once_end_where_each_alone_does():
    """Decodes, chains and trees, padded at times, whose drafts are right at times; every third step has broken rows."""
    rng, lengths, errors = random.Random(5), set(), 0
    for step in range(60):
        spans, held = [], []
        for row in range(rng.randint(1, 6)):
            seq = Sequence(Request(id=str(row), prompt_ids=[1, 2, 3], params=SamplingParams(), seed=0, max_tokens=20))
            seq.draft = [rng.randrange(2) for _ in range(rng.randint(0, 5))]
            parents = (
                [-1, *(rng.randrange(i) for i in range(1, 1 + len(seq.draft)))]
                if len(seq.draft) > 1 and rng.random() < 0.3
                else None
            )
            want = {"sample": range(1 + len(seq.draft))} if seq.draft else ONE_SAMPLE
            spans.append(
                Span(
                    seq,
                    2,
                    1 + len(seq.draft),
                    want=want,
                    commit="walk" if seq.draft else "all",
                    parents=parents,
                    seat=row,
                )
            )
            held.append([3, *seq.draft])
        count = sum(map(len, held))
        size = count + rng.choice([0, 3])
        words = np.empty((ROW_WORDS, size), np.int64)
        draft_words(spans, 9, words)
        assert words[2, :count].tolist() == [token for tokens in held for token in tokens]
        draws = np.array([[rng.randrange(2) for _ in range(size)], [1.0] * size, [1.0] * size], np.float32)
        for m in range(0 if step % 3 else size):
            if rng.random() < 0.15:
                draws[1 + step % 2, m] = -np.inf if step % 2 else np.nan
        draws[1:, count:] = np.nan  # a padding row
        found = DecodeHandle(mock.Mock(read=mock.Mock(return_value=draws)), size, spans, words[:, :count]).read()
        tokens = draws[0].astype(np.int64).tolist()
        wrong = {m: NUMERIC_ERROR for m in range(count) if draws[2, m] == -np.inf or np.isnan(draws[1, m])}
        first = 0
        for span, ours, result in zip(spans, held, found):
            rows = {i: first + i for i in range(span.length)}
            assert result == resolve_span(span, ours if span.length > 1 else [], rows, tokens, wrong, {}, {})
            lengths.add(len(result.tokens))
            errors += result.error is not None
            first += span.length
    assert lengths >= {0, 1, 2, 3, 4} and errors > 5


def test_steps_that_no_graph_takes_are_booked_apart():
    """Where only chains are captured, a router that mixes guests with chains tells their times apart."""
    graphs = mock.Mock(
        most_drafted=128, buckets=[1, 2, 4, 8, 16], bucket=lambda n: 1 << (n - 1).bit_length(), replays=lambda *_: True
    )
    times = DraftTimes(Roofline(5e12, 1e15, 1e9, 1e9, 1e3, 1e3), graphs)
    for _ in range(12):
        times.observe(2, 100, 0, False, 1e-3)
        times.observe(2, 100, 6, True, 1.1e-3)
    chain = times.predict(2, 100, 6, True)
    for _ in range(12):
        times.observe(2, 100, 6, True, 6e-3, eager=True)
    assert times.predict(2, 100, 6, True) > 4e-3, "what the last ones did is expected of the next one"
    times.observe(2, 100, 6, True, 1.1e-3)
    assert abs(times.predict(2, 100, 6, True) - chain) < 2e-4
