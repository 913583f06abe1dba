"""Guests that draw: in every way to run a step, behind prompts, and priced by what they promise."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvasir.decoding.guesses import listed
from kvasir.engine.schedule.spans import Tail, next_span
from kvasir.engine.ways import mixed_steps
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.kernels.guess import guess_rows_ref
from kvasir.kernels.sample import sample_rows_ref
from kvasir.speculation.controller import Controller
from kvasir.speculation.drafter import Drafter
from kvasir.speculation.router import Router
from kvasir.speculation.tree import DraftTree
from kvasir.types import Request, SamplingParams, Sequence
from tests.engine.driver import use_ways
from tests.engine.stepwise import Stepwise
from tests.speculation.helpers import driver, install, plain, requests


class Tailed(Drafter):
    """Right and wrong chains with one chain of guests at their end, and behind prompts."""

    tail = (0, 1)

    def __init__(self, told, dim: int) -> None:
        super().__init__()
        self.told, self.guests = told, 3 * torch.randn(2, dim, generator=torch.Generator().manual_seed(0))
        self.heard: list[tuple] = []  # request, number of known tokens, guesses

    def propose(self, asks):
        trees = []
        for ask in asks:
            right = self.told[ask.seq.request.id, ask.seq.branch][ask.seq.num_output :]
            size = ask.seq.num_output % 3 if ask.max_nodes > 3 else 0
            chain = [token ^ (i == 1 and ask.seq.num_output % 2) for i, token in enumerate(right[:size])]
            tree = DraftTree.chain(chain, 0.9)
            tree.guests = {len(tree) - 1: ((0, 1),)}
            trees.append(tree)
        return trees

    def answer(self, seq, tree, node, guesses):
        if guesses:
            self.heard.append(((seq.request.id, seq.branch), len(seq.tokens), guesses))


def run(how, **params):
    """Run with guests, in these ways. Returns tokens, what guests guessed, and the rows that each way ran."""
    wanted = {key: tokens for key, (tokens, _) in plain(1.0, 1, **params).items()}
    d = driver("replay", max_num_batched_tokens=96, max_num_seqs=5)
    if how is not None:
        use_ways(d.engine.runner, *how)
    install(d, Tailed(wanted, d.engine.runner.model.spec.hidden_size))
    ran: dict[type, int] = {}
    for way in d.engine.runner.ways:
        real = way.run

        def counted(spans, real=real, way=way):
            kind = type(way)
            ran[kind] = ran.get(kind, 0) + any(span.guests for span in spans)
            return real(spans)

        way.run = counted
    d.run(requests(d, 1.0, logprobs=None, **params), preempt_every=6)
    assert not d.errors and {key: out.tokens for key, out in d.outputs.items()} == wanted
    assert not d.engine.proposals.drafting._failures
    heard = d.engine.proposals.drafting.drafter.heard
    d.close()
    return heard, ran


def test_a_chain_of_guests_runs_with_prompts_and_row_by_row(monkeypatch):
    """Exact mode shares no keys, so graphs run row by row; steps with prompts are captured in pieces. All ways give the
    same guesses."""
    monkeypatch.setattr(mixed_steps, "EAGER_STEPS", 0)  # captured at once
    heard, _ = run(None)
    static, ran = run((call_through, 8, Stepwise(), 96))
    assert ran.get(DecodeGraphs) and ran.get(MixedSteps), ran
    assert len(heard) > 10 and len(static) == len(heard)
    for (key, known, ours), (other, also, theirs) in zip(sorted(heard), sorted(static)):
        assert (key, known) == (other, also)
        assert [[t for t, _ in row] for row in ours] == [[t for t, _ in row] for row in theirs]
        assert np.allclose([p for row in ours for _, p in row], [p for row in theirs for _, p in row], atol=1e-4)


def test_a_prompt_ends_with_guests():
    """The first decode of a request has guesses already. Mutation: ``Tail.fits`` says no."""
    heard, _ = run(None)
    prompts = {r: min(known for (name, _), known, _ in heard if name == r) for r in {k[0] for k, _, _ in heard}}
    d = driver("replay")
    lengths = {r.id: len(r.prompt_ids) for r in requests(d, 0.0)}
    d.close()
    assert all(prompts[r] == lengths[r] + 1 for r in prompts) and len(prompts) == len(lengths)


def sequence(length: int, **params) -> Sequence:
    given = SamplingParams(**params)
    return Sequence(Request(id="r", prompt_ids=list(range(length)), params=given, seed=0, max_tokens=8))


def test_a_tail_needs_no_tree_and_knows_its_place():
    seq = sequence(5)
    seq.num_computed, seq.draft, seq.guests = 4, [7, 8], {1: ((0, 0),)}
    span = next_span(seq, 3)
    assert span.parents is None and span.length == 5 and span.want == {"sample": range(3), "guess": range(3, 5)}
    assert span.tokens() == [4, 7, 8]
    seq.guests = {0: ((0, 0),)}
    assert next_span(seq, 3).parents == [-1, 0, 1, 1, 3]
    tail = Tail((0, 0), names=("x",))
    assert tail.fits(sequence(5), 5, 7, 64)
    assert not tail.fits(sequence(5), 5, 6, 64) and not tail.fits(sequence(5), 4, 9, 64), "no row, or not the end"
    assert not tail.fits(sequence(5), 5, 7, 6), "no position"
    assert not tail.fits(sequence(5, num_draft_tokens=0), 5, 7, 64)
    assert not tail.fits(sequence(5, drafter="y"), 5, 7, 64)


# ---------------------------------------------------------------------------------------------------------------- price


def tailed(est, promise=(0.8, 0.6)) -> DraftTree:
    tree = DraftTree.chain(range(5, 5 + len(est)), list(est))
    tree.guests, tree.promise = {len(est) - 1: ((0, 0),)}, promise
    return tree


def test_a_tail_moves_to_the_last_node_kept():
    tree = tailed([0.9, 0.9, 0.1])
    assert tree.has_tail and tree.keep(range(2)).guests == {1: ((0, 0),)}
    assert tree.keep(()).guests == {-1: ((0, 0),)} and tree.keep(range(2)).promise == tree.promise


def priced(row: float) -> Controller:
    return Controller(lambda seqs, context, rows, drafted: 1.0 + row * rows)


def test_an_unlikely_last_node_goes_and_the_next_drafts_stay():
    """A row costs 4 %: the node is not worth its row. Mutation: guests are cost alone, and go with their node."""
    (kept,) = priced(0.04).allocate([tailed([0.9, 0.9, 0.01])], 100, 50)
    assert len(kept) == 2 and kept.guests == {1: ((0, 0),)}
    (kept,) = priced(0.01).allocate([tailed([0.9, 0.9, 0.9])], 100, 50)
    assert len(kept) == 3 and kept.guests == {2: ((0, 0),)}


def test_guests_that_promise_less_than_they_cost_go():
    (kept,) = priced(0.3).allocate([tailed([0.95], promise=(0.9, 0.05))], 100, 50)
    assert kept.guests == {0: ((0,),)}, "the second guest costs more than it promises"
    (kept,) = priced(3.0).allocate([tailed([0.95], promise=(0.5, 0.3))], 100, 50)
    assert not kept.guests and not kept.tokens


def test_guests_of_a_tree_go_with_the_chance_that_the_walk_ends_there():
    tree = DraftTree.chain([5], 0.9)
    tree.guests, tree.promise = {-1: ((0,),), 0: ((0,),)}, (0.8,)
    (kept,) = priced(0.12).allocate([tree], 100, 50)
    assert len(kept) == 1 and set(kept.guests) == {0}


# --------------------------------------------------------------------------------------------------------------- router


def test_cold_rows_carry_another_drafters_draft():
    host = Tailed({}, 4)
    host.name, host.place = "host", "same_device"
    host.propose = lambda asks: [DraftTree(guests={-1: ((0, 1),)}) for _ in asks]
    host.attach = lambda model, capture=None: None
    copy = SimpleNamespace(
        name="copy", place="cpu", topology="chain", top_tokens=0, hidden_layers=(), follows=False, guests=None,
        open=lambda seq: None,
        attach=lambda model, capture=None: None, propose=lambda asks: [DraftTree.chain([3, 4], 0.5) for _ in asks],
    )  # fmt: skip
    router = Router([copy, host])
    router.attach(None)
    router._mean = lambda seq, name: 3.0  # the model's own drafts are the best, where it has some
    (tree,) = router.propose([SimpleNamespace(seq=sequence(5), max_nodes=8, max_depth=8)])
    assert tree.source == "copy" and tree.tokens == [3, 4] and tree.guests == {1: ((0, 1),)}


# -------------------------------------------------------------------------------------------------------------- guesses


def test_a_guess_is_what_the_sampler_draws_there():
    logits, streams = 2 * torch.randn(6, 90, generator=torch.Generator().manual_seed(1)), torch.arange(6) + 11
    temperature, positions = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.0, 1.0]), torch.arange(6) + 3
    top_k, ones, zeros = torch.tensor([90, 90, 90, 90, 2, 90], dtype=torch.int32), torch.ones(6), torch.zeros(6)
    drawn = sample_rows_ref(logits, temperature, top_k, ones, zeros, streams, positions, 90)[0]
    wanted = torch.tensor([True] * 5 + [False])
    found = guess_rows_ref(logits, drawn, temperature, streams, positions, wanted, 90, 3)
    assert torch.equal(found[0, :5], drawn[:5]) and not found[:, 5].any()
    assert torch.allclose(found[3:, 0], logits[0].softmax(-1).topk(3).values)
    rows = listed(found[:, :5].numpy())
    assert all(len({token for token, _ in row}) == 3 and row[1][1] >= row[2][1] for row in rows)
    broken = found[:, :1].clone()
    broken[3] = float("nan")
    assert listed(broken.numpy()) == [[]]


@pytest.mark.parametrize("count", [1, 4])
def test_more_guesses_than_asked_for_are_never_given(count):
    logits = torch.randn(2, 3)
    found = guess_rows_ref(
        logits, logits.argmax(-1), torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long),
        torch.ones(2, dtype=torch.bool), 3, count,
    )  # fmt: skip
    assert found.shape == (2 * count, 2) and bool((found[0] == logits.argmax(-1)).all())


def self_drafted(control: Controller, steps: int, price: float) -> list[int]:
    """Simulate one sequence whose guests write the next step's three drafts, all right. A drafted step takes ``price``
    plain ones. Returns the drafts of each step."""
    drafts, written = [], False
    for _ in range(steps):
        if control.resting() or not control.wanted(1, 100):
            control.rested(1.0)
            drafts.append(0)
            written = False
            continue
        (kept,) = control.allocate([tailed([0.5] * 3 if written else [], promise=(0.9, 0.8, 0.7))], 100, 50)
        if kept.tokens:
            control.observe(kept, list(range(len(kept))))
        drafts.append(len(kept))
        written = bool(kept.guests)
        control.end_step(1, 100, price)
    return drafts


def test_a_trial_lasts_until_something_was_verified():
    """The first step of a trial has guests alone. Mutation: it ends the trial, so that nothing is ever verified."""
    flat = Controller(lambda seqs, context, rows, drafted: 2.2 if drafted else 1.0)
    assert self_drafted(flat, 400, 2.2)[-50:] == [3] * 50
    dear = Controller(lambda seqs, context, rows, drafted: 6.0 if drafted else 1.0)
    late = self_drafted(dear, 2000, 6.0)[1000:]
    assert sum(1 for count in late if count) < 20, "drafts that lose are left out but for rare trials"
