"""The gated delta rule: a plain loop in fp64, the scan beside the recurrence, and steps over state pages: cut anywhere,
run again, with drafts. Planted mistakes must be seen."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import gated_delta
from kvasir.kernels.gated_delta import CHUNK, Weights, chunk_scan, recurrence, step_reference
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import LOOK_AHEAD, GatedDeltaSpec, NormSpec
from kvasir.types import CacheGroup, PageCopy

SPEC = GatedDeltaSpec(2, 4, 8, 12, NormSpec())
DIMS = SPEC.num_value_heads, SPEC.key_dim, SPEC.value_dim
TOKENS, PAGES = 200, 8
GROUP = CacheGroup("state", (0, 1), kind="state", states=(SPEC.state(), SPEC.state()))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = Weights(drawn(SPEC.mixed, SPEC.taps, seed=1), drawn(4, seed=2), drawn(4, seed=3), SPEC.num_key_heads)
ROWS = drawn(TOKENS, SPEC.mixed + 2 * SPEC.num_value_heads, seed=4)


def prepared():
    tail = torch.zeros(SPEC.taps - 1, SPEC.mixed)
    return gated_delta.inputs(ROWS, tail, WEIGHTS, DIMS)


def truth():
    """Every row's result, by the paper's formula in fp64."""
    q, k, v, decay, beta = (x.double() for x in prepared())
    state, out = torch.zeros(*DIMS, dtype=torch.float64), []
    eye = torch.eye(DIMS[1], dtype=torch.float64)
    for t in range(TOKENS):
        for h in range(DIMS[0]):
            forget = eye - beta[t, h] * torch.outer(k[t, h], k[t, h])
            state[h] = decay[t, h].exp() * forget @ state[h] + beta[t, h] * torch.outer(k[t, h], v[t, h])
        out.append(torch.einsum("hdv,hd->hv", state, q[t]))
    return torch.stack(out), state


def test_both_forms_are_the_formula():
    want, last = truth()
    for form in (recurrence, chunk_scan):
        got, state = form(*prepared(), torch.zeros(*DIMS))
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state.double(), last, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_the_scan_goes_on_from_a_state(cut):
    whole, last = chunk_scan(*prepared(), torch.zeros(*DIMS))
    first, state = chunk_scan(*(x[:cut] for x in prepared()), torch.zeros(*DIMS))
    second, state = chunk_scan(*(x[cut:] for x in prepared()), state, start=cut)
    compare = torch.equal if cut % CHUNK == 0 else lambda a, b: torch.allclose(a, b, atol=1e-5, rtol=1e-4)
    assert compare(torch.cat((first, second)), whole) and compare(state, last)


class Pages:
    """A pool of poisoned state pages, and one sequence whose rows are ``ROWS``."""

    def __init__(self, exact=True):
        self.pool = KVPool([GROUP], PlainCodec(), [PAGES], 16, "cpu", torch.float32)
        self.pool.poison(0, list(range(PAGES)))
        self.exact, self.table = exact, (1, 2)

    def launch(self, start, rows, table=None):
        """Run one step in both layers; nothing is committed."""
        found = [
            step_reference(
                rows, self.pool.layer(i).planes, [table or self.table], [start], [len(rows)], WEIGHTS, self.exact
            )
            for i in range(2)
        ]
        assert torch.equal(*(layer.nan_to_num() for layer in found))
        return found[0]

    def commit(self, length):
        if length > LOOK_AHEAD:
            self.table = self.table[::-1]

    def run(self, lengths, start=0):
        out = []
        for length in lengths:
            out.append(self.launch(start, ROWS[start : start + length]))
            self.commit(length)
            start += length
        return torch.cat(out)


WHOLE = Pages().run([TOKENS])


@pytest.mark.parametrize("first", [1, 16, 17, 64, 100, 183, 184, 199])
def test_a_cut_changes_no_bit(first):
    """In exact mode; the default form is close."""
    assert torch.equal(Pages().run([first, TOKENS - first]), WHOLE)
    torch.testing.assert_close(Pages(exact=False).run([first, TOKENS - first]), WHOLE, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_every_cut_changes_no_bit():
    for first in range(1, TOKENS):
        assert torch.equal(Pages().run([first, TOKENS - first]), WHOLE), first


def mixed_lengths():
    return [5, 1, 1, 40, 16, 1, 17, 3, 64, 1, 1, 16, 34]


def test_chunks_and_decodes_change_no_bit():
    assert sum(mixed_lengths()) == TOKENS
    assert torch.equal(Pages().run(mixed_lengths()), WHOLE)


def again(pages):
    """Every step runs, fails, and runs again, first with its first row alone."""
    start, out = 0, []
    for length in mixed_lengths():
        rows = ROWS[start : start + length]
        pages.launch(start, rows[:1])
        pages.launch(start, rows)
        out.append(pages.launch(start, rows))
        pages.commit(length)
        start += length
    return torch.cat(out)


def drafted(pages, accepted, wrong=lambda length: length):
    """Steps of one token and seven drafts, ``accepted`` of which are right. ``wrong``: what is counted as committed."""
    start, out = 8, [pages.launch(0, ROWS[:8])]
    while start + 8 <= TOKENS:
        draft = ROWS[start : start + 8].clone()
        draft[1 + accepted :] = drawn(*draft[1 + accepted :].shape, seed=start)
        got = pages.launch(start, draft)
        out.append(got[: 1 + accepted])
        start += wrong(1 + accepted)
    return torch.cat(out)


def test_a_step_may_be_run_again():
    assert torch.equal(again(Pages()), WHOLE)


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_rejected_drafts_leave_no_trace(accepted):
    got = drafted(Pages(), accepted)
    assert torch.equal(got, WHOLE[: len(got)])


def test_a_snapshot_continues_where_it_was_taken():
    """A copy of the page has the rows that are not folded yet, so it is exact after short and long spans."""
    for lengths in ([48], [40, 8]):
        pages = Pages()
        pages.run(lengths)
        pages.pool.copy([PageCopy(0, pages.table[0], 5)])
        pages.run([60], start=48)  # the sequence goes on
        branch, pages.table = pages.table, (5, 6)
        assert torch.equal(pages.run([1, 30], start=48), WHOLE[48:79])
        pages.table = branch
        assert torch.equal(pages.run([3], start=108), WHOLE[108:111]), "and neither disturbs the other"


def test_spans_of_a_step_do_not_meet():
    """Three sequences in one step: a new one whose page holds another's rest, a decode and a long chunk."""
    pages = Pages()
    pages.run([30])
    planes = pages.pool.layer(0).planes
    table = [(4, 0), pages.table, (6, 7)]
    spans = [(0, 5), (30, 1), (0, 40)]
    rows = torch.cat([ROWS[start : start + length] for start, length in spans])
    got = step_reference(rows, planes, table, *zip(*spans), WEIGHTS, True)
    assert torch.equal(got, torch.cat([WHOLE[start : start + length] for start, length in spans]))


# ----------------------------------------------------------------------------------------------------- planted mistakes


def in_place(monkeypatch):
    """The state after all rows of a short span is written over the page's own."""
    real = gated_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact=False):
        out = real(rows, planes, pages, starts, lengths, weights, exact)
        for (read, _), start, length in zip(pages, starts, lengths):
            if length <= LOOK_AHEAD:
                given = planes["matrix"][read], planes["tail"][read]
                state, tail = gated_delta._advance(planes["ahead"][read, :length], *given, weights, DIMS)
                planes["matrix"][read], planes["tail"][read], planes["position"][read] = state, tail, start + length
        return out

    monkeypatch.setitem(globals(), "step_reference", wrong)


def cleared_tail(monkeypatch):
    real = gated_delta.inputs
    monkeypatch.setattr(gated_delta, "inputs", lambda rows, tail, *rest: real(rows, torch.zeros_like(tail), *rest))


def undated(monkeypatch):
    """The position stays behind, so that rows are folded twice."""
    real = gated_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact=False):
        before = [int(planes["position"][read]) for read, _ in pages]
        out = real(rows, planes, pages, starts, lengths, weights, exact)
        for (read, _), start, old in zip(pages, starts, before):
            if start and old != start:
                planes["position"][read] = old
        return out

    monkeypatch.setitem(globals(), "step_reference", wrong)


def differs(run):
    try:
        got = run()
    except AssertionError as e:  # a state that is past the span's start
        return "cannot reach" in str(e)
    return not torch.equal(got, WHOLE[: len(got)])


@pytest.mark.parametrize(
    "plant, run",
    [
        (in_place, lambda: again(Pages())),
        (in_place, lambda: drafted(Pages(), 1)),
        (cleared_tail, lambda: Pages().run([50, 150])),
        (undated, lambda: again(Pages())),
        (lambda monkeypatch: None, lambda: drafted(Pages(), 1, wrong=lambda length: 8)),
        (lambda monkeypatch: None, lambda: late_snapshot()),
    ],
    ids=["in place, again", "in place, drafts", "cleared tail", "folded twice", "folded without the walk", "late"],
)
def test_the_comparison_sees(plant, run, monkeypatch):
    plant(monkeypatch)
    assert differs(run)


def late_snapshot():
    """A branch from 48 tokens starts from the state one token later."""
    pages = Pages()
    out = pages.run([48])
    pages.run([1, 1], start=48)
    pages.pool.copy([PageCopy(0, pages.table[0], 5)])  # its state stands at 49
    pages.table = (5, 6)
    pages.pool.layer(0).planes["position"][5] = 48
    pages.pool.layer(1).planes["position"][5] = 48
    return torch.cat((out, pages.run([30], start=48)))


def test_planes_do_not_overlap():
    pool = KVPool([GROUP], PlainCodec(), [2], 16, "cpu", torch.bfloat16)
    assert pool.page_bytes(0) % 8 == 0 and pool.bytes_per_token() == 0
    views = [plane for i in range(2) for plane in pool.layer(i).planes.values()]
    for number, view in enumerate(views):
        view[1] = number
    assert all(bool((view[1] == number).all()) and not view[0].any() for number, view in enumerate(views))
