"""The trainer's loop: what it takes, how often, when it proposes weights, and what it does with numbers that are
none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.learn import learner as module
from kvasir.learn.branch_loss import branch_loss
from kvasir.learn.learner import MOST_FAILED, MOST_SCALED, WIDTH, Learner, Recipe, head_to_learn, tokens_and_forwards
from kvasir.learn.pace import FIRST, LEAST_ROWS, LONGEST, SLICE_SECONDS, Pace
from kvasir.learn.packed import pack
from kvasir.learn.pieces import USES, Pieces, cut
from kvasir.learn.trace import PLAIN, REJECTED
from kvasir_lab.bench import drift
from tests.learn.handmade import STEPS, nano, trace_of

TINY = Recipe(every=4, rows=64, forwards=1, rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base():
    return nano()


@pytest.fixture(scope="module")
def replay(base):
    """Replies of the shipped model with their traces."""
    target, tokenizer = drift.load_target("nano", "cpu")
    return drift.Replay(target, base, drift.sampled(target, tokenizer, ["chain"], 10, 20, "test"))


def learner_for(base, recipe=TINY, kind="medusa", scratch=True):
    return Learner(head_to_learn(kind, base, ""), base, recipe, scratch=scratch)


def traces_for(base, count=12, layers=(3,)):
    return [trace_of(base, layers, STEPS, seed=i, request=f"r{i}") for i in range(count)]


def test_a_trace_is_used_four_times_at_most_and_some_are_held_back(base):
    learner, drawn = learner_for(base), []
    for trace in traces_for(base, 40):
        learner.add(trace)
    held = {t.request for t in learner.pieces.held_back}
    assert 0 < len(held) < 15 and learner.traced > 0
    while found := learner.pieces.draw(64):
        drawn += [t.request for t in found]
    assert set(drawn) == {f"r{i}" for i in range(40)} - held and all(drawn.count(name) == USES for name in set(drawn))


def test_memory_is_bounded_and_the_oldest_go_first(base):
    traces = traces_for(base, 30)
    pieces = Pieces(3 * traces[0].states.nbytes, held_rows=2 * traces[0].num_rows)
    for trace in traces:
        pieces.add(trace)
    assert len(pieces) == 3 and len(pieces.held_back) <= 3
    assert pieces.held_back[-1].request == next(t.request for t in traces[::-1] if not Pieces(1, 1).add(t))
    pieces.clear()
    assert len(pieces) == 0 and not pieces.held_back and pieces.draw(100) == []


@pytest.mark.parametrize("rows", [1, 6, 1000])
def test_pieces_hold_every_row_and_guess_once(base, rows):
    trace = trace_of(base, (3,), STEPS)
    pieces = list(cut(trace, rows))
    for piece in pieces:
        piece.check()
        assert piece.tokens[0] == piece.row_tokens[0] and piece.start == piece.positions[0]
        last = piece.positions[piece.kinds != REJECTED].max()
        assert len(piece.tokens) == last + 2 - piece.start
        assert (piece.tokens == trace.tokens[piece.start : last + 2]).all()
        for row, parent in enumerate(piece.parents.tolist()):
            assert parent < 0 or piece.positions[parent] == piece.positions[row] - 1
    assert sum(piece.num_rows for piece in pieces) == trace.num_rows
    assert sum(int((piece.kinds == PLAIN).sum()) for piece in pieces) == int((trace.kinds == PLAIN).sum())
    if rows == 1000:
        assert pieces == [trace]


def test_it_learns_and_proposes_what_gains(base, replay):
    learner, start = learner_for(base, replace(TINY, rows=512, forwards=16)), learner_for(base).head
    traces = [replay.request(i, replay.served(start))[2] for i in range(10)]
    while learner.candidate is None and learner.steps < 80:
        for trace in traces:
            learner.add(trace)
        drift.learn(learner, 4)
    weights, before, after = learner.candidate
    assert after >= 1.01 * before >= 1.01 and learner.by_level[0] > 0
    # The same count as serving does: on held-back replies, with the weights that were proposed.
    head = replay.served(start)
    head.load_state_dict(weights)
    held = list(learner.pieces.held_back)
    found = np.array([tokens_and_forwards(head, base, t) for t in held]).sum(0)
    assert found[0] / found[1] == pytest.approx(after)
    numbers = [int(t.request.split()[1]) for t in held]
    again = np.array([replay.request(i, head)[:2] for i in numbers]).sum(0)
    assert again.tolist() == found.tolist()

    learner.rolled_back()
    assert learner.candidate is None and learner._least == after, "the next one must gain over this one"
    learner._served = {name: torch.zeros_like(p) for name, p in weights.items()}
    for _ in learner._gate():
        pass
    assert learner.candidate is None or learner.candidate[2] >= 1.01 * after
    learner.candidate = weights, before, after
    learner.accepted()
    assert all(torch.equal(learner._served[name], weights[name].float()) for name in weights)


@pytest.mark.parametrize("rows", [64, 24])
def test_a_step_launches_nothing_for_the_few_rows_that_are_left(base, rows):
    learner, steps, now = learner_for(base, replace(TINY, every=1000)), [], []
    learner.slice_rows = rows
    for i in range(60):
        learner.add(trace_of(base, (3,), STEPS[i % 3 :], seed=i, request=f"r{i}"))
    for found in learner.slices():
        if found is None:
            break
        if found:
            now.append(found)
        elif now:
            steps.append(now)
            now = []
    assert len(steps) > 3
    # The last step may have ended for want of traces.
    assert all(sum(step[:-1]) < 56 <= sum(step) for step in steps[:-1])


def test_no_slice_waits_for_what_a_step_has_found(base, monkeypatch):
    class Late:
        """Numbers that arrive when they were asked for a third time; reading them earlier is a mistake."""

        def __init__(self, found):
            self._found, self._asked = found, 0

        def here(self):
            self._asked += 1
            return self._asked == 3

        @property
        def numbers(self):
            assert self._asked == 3, "read before it arrived"
            return self._found

    monkeypatch.setattr("kvasir.learn.learner.Arriving", Late)
    learner, found = learner_for(base, replace(TINY, every=1000)), []
    for i in range(20):
        learner.add(trace_of(base, (3,), STEPS[i % 3 :], seed=i, request=f"r{i}"))
    slices = learner.slices()
    while learner.steps < 2:
        found.append(next(slices))
    first = next(i for i, rows in enumerate(found) if rows)
    end = next(i for i, rows in enumerate(found[first:], first) if not rows)
    assert found[end : end + 3] == [0, 0, 0] and found[end + 3], "two slices of waiting and one that ends the step"


def test_old_traces_leave_the_pool_before_a_trainer_has_used_them_up(base):
    pieces, new = Pieces(1 << 40, 1 << 40, num_rows=200), set()
    for trace in traces_for(base, 120):  # more than is drawn
        pieces.add(trace)
    for i, trace in enumerate(traces_for(base, 30)):
        if pieces.add(replace(trace, request=f"new {i}")):
            new.add(f"new {i}")
    drawn = [t.request for _ in range(4) for t in pieces.draw(64)]
    assert drawn and set(drawn) <= new


def test_the_rate_falls_after_three_gates_without_a_gain_and_comes_back_with_other_traffic(base):
    learner = learner_for(base, replace(TINY, rate=3e-4, settled_rate=1e-4))
    fast, weights = learner.rate, learner._copied()
    for _ in range(4):
        learner._judge(weights, 1.0, 1.0)
    assert learner.rate == fast, "random weights that never gained are still random"
    learner._judge(weights, 1.0, 1.5)
    assert learner.candidate is not None
    learner.accepted()
    for _ in range(2):
        learner._judge(weights, 1.5, 1.5)
        assert learner.rate == fast
    learner._judge(weights, 1.46, 1.46)
    assert learner.rate == pytest.approx(fast / 3) and learner.candidate is None
    learner._judge(weights, 1.5, 1.6)
    learner.rolled_back()
    learner._judge(weights, 1.4, 1.55)  # the served weights lose 7 %
    assert learner.rate == fast
    assert learner.candidate is not None, "what was rolled back was judged on other traffic"


def test_the_gate_judges_on_the_newest_traces_alone(base, monkeypatch):
    """A candidate that follows a change loses what came before it, and must pass."""
    learner = learner_for(base, replace(TINY, forwards=5))
    held = [t for t in traces_for(base, 400) if not Pieces(1, 1).add(t)]
    for trace in held:
        learner.add(trace)
    new = {t.request for t in held[-6:]}

    def counted(head, base, trace):
        served = all(torch.equal(p, learner._served[name]) for name, p in head.named_parameters())
        return (12 if (trace.request in new) != served else 6), 6

    monkeypatch.setattr(module, "tokens_and_forwards", counted)
    with torch.no_grad():
        next(learner.head.parameters()).add_(1.0)
    for _ in learner._gate():
        pass
    assert len(held) > 30 and learner.candidate is not None
    assert learner.candidate[1:] == (1.0, 2.0)
    learner.recipe, learner.candidate = replace(learner.recipe, forwards=1 << 20), None
    for _ in learner._gate():
        pass
    assert learner.candidate is None, "there are too few"
    learner.recipe = replace(learner.recipe, forwards=6 * len(held))
    for _ in learner._gate():
        pass
    assert learner.candidate is None, "judged on all that is held back, it loses"


def test_narrow_models_learn_faster(base):
    learner = learner_for(base, Recipe())
    assert base.dim < WIDTH and learner.rate == pytest.approx(1e-4 * min(MOST_SCALED, WIDTH / base.dim))
    learner.base = SimpleNamespace(dim=2 * WIDTH)
    assert learner.rate == 1e-4


def test_nothing_is_proposed_without_enough_forwards(base):
    learner = learner_for(base, replace(TINY, forwards=10_000))
    learner.add(next(t for t in traces_for(base, 40) if not Pieces(1, 1).add(t)))
    for _ in learner._gate():
        pass
    assert learner.candidate is None and learner._idle_gates == 0


def test_a_loss_that_is_no_number_never_becomes_a_candidate(base, monkeypatch):
    learner = learner_for(base)
    before = [p.clone() for p in learner.head.parameters()]
    for trace in traces_for(base, 40):
        learner.add(trace)
    real = module.branch_loss

    def broken(*args):
        found = real(*args)
        return replace(found, pull=found.pull * float("nan"), loss=found.loss * float("nan"))

    monkeypatch.setattr(module, "branch_loss", broken)
    with pytest.raises(ConfigError, match=f"no number {MOST_FAILED} times"):
        for _ in learner.slices():
            assert all(torch.equal(p, b) for p, b in zip(learner.head.parameters(), before)), "the served weights"
    assert learner.candidate is None and learner.steps == 0


def test_weights_that_are_no_numbers_never_pass_the_gate(base):
    learner = learner_for(base)
    for trace in traces_for(base, 20):
        learner.add(trace)
    with torch.no_grad():
        next(learner.head.parameters()).fill_(float("nan"))
    for _ in learner._gate():
        pass
    assert learner.candidate is None and all(bool(p.isfinite().all()) for p in learner.head.parameters())


def test_states_that_are_no_numbers_are_left_out(base):
    learner = learner_for(base)
    states = traces_for(base, 1)[0].states.copy()
    states[3, 0, 5] = np.nan
    learner.add(replace(traces_for(base, 1)[0], states=states))
    bits = (states.view(np.uint32) >> 16).astype(np.uint16)
    learner.add(replace(traces_for(base, 1)[0], states=bits, dtype="bfloat16"))
    assert len(learner.pieces) == 0 and not learner.pieces.held_back and learner.traced == 0


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_cpu_learns_from_an_engine_in_16_bits(kind):
    """Heads that learn are in fp32, traces and embeddings are not. The gate judges heads as they are served."""
    half = nano(torch.bfloat16)
    learner = learner_for(half, replace(TINY, every=1), kind)
    for trace in traces_for(half, layers=learner.head.shape.layers):
        bits = torch.from_numpy(trace.states).bfloat16().view(torch.int16).numpy().view(np.uint16)
        learner.add(replace(trace, states=bits, dtype="bfloat16"))
    drift.learn(learner, 4)
    assert learner.steps == 4 and all(0 < nats < 20 for nats in learner.by_level)
    assert learner._best > 0, "no gate has passed"


def test_the_head_reads_its_own_layers_of_a_trace(base):
    """A head that does not read the last layer is still judged by it."""
    head = head_to_learn("eagle", base, "")
    narrow = type(head)(replace(head.shape, layers=(0, 2)))
    narrow.begin_with(base.norm_E.float(), base.embed_VE.float(), torch.Generator().manual_seed(0))
    wide = trace_of(base, (0, 2, 3), STEPS, request="r1")
    learner = Learner(narrow, base, TINY, scratch=True, layers=(0, 2, 3))
    learner.add(trace_of(base, (0, 1, 3), STEPS, request="r1"))
    assert not [*learner.pieces.draw(10), *learner.pieces.held_back], "a trace of other layers"
    learner.add(wide)
    (piece,) = [*learner.pieces.draw(10), *learner.pieces.held_back]
    found = branch_loss(narrow, base, pack([piece], 4), 0.25).loss
    changed = wide.states.copy()
    changed[:, 2] += 1.0  # what the model wanted
    assert branch_loss(narrow, base, pack([replace(wide, states=changed)], 4), 0.25).loss != found
    assert tokens_and_forwards(narrow, base, wide)[1] > 0
    with pytest.raises(ConfigError, match="last one"):
        Learner(head, base, TINY, scratch=True, layers=(3, 5))


def test_kinds_that_cannot_learn_are_refused_with_those_that_can(base):
    with pytest.raises(ConfigError, match="'ppd' cannot learn while it serves; eagle and medusa can"):
        head_to_learn("ppd", base, "")


@pytest.mark.parametrize(
    "launch, row, least, most",
    [(0.0, 1e-4, 60, 90), (0.02, 1e-5, 1024, 1024), (0.02, 1e-4, 200, 260), (0.1, 1e-3, 120, 160)],
)
def test_the_pace_keeps_share_and_slices(launch, row, least, most):
    """The rows of a slice take at most as long as a slice of the fewest rows, or 5 ms where that is more."""
    now = [0.0]
    pace = Pace(0.1, lambda: now[0])
    rows = LEAST_ROWS
    for _ in range(400):
        seconds = launch + rows * row
        now[0] += seconds
        now[0] += pace.rest(seconds)
        rows = pace.rows(rows, rows, 1024, seconds)
    assert least <= rows <= most
    assert (rows - LEAST_ROWS) * row <= max(SLICE_SECONDS, launch + LEAST_ROWS * row)
    assert pace.busy_share == pytest.approx(0.1, rel=0.1)
    alone = Pace(1.0, lambda: now[0])
    assert alone.rest(3.0) == 0 and alone.rows(64, 64, 1024, 3.0) == 1024


def test_the_share_is_kept_by_slices_of_a_second():
    """A trainer that waits for a busy device again and again has such slices, after the first ones as well."""
    now = [0.0]
    pace = Pace(0.1, lambda: now[0])
    for _ in range(FIRST + 20):
        now[0] += 1.0
        now[0] += pace.rest(1.0)
    assert pace.busy_share < 0.15


def test_rows_grow_beside_a_device_whose_slices_vary():
    """Slices of the same rows differ by up to 4 ms there, many times more than what their rows add."""
    pace, rows, random, seen = Pace(0.1, lambda: 0.0), LEAST_ROWS, np.random.default_rng(0), []
    for _ in range(200):
        rows = pace.rows(rows, rows, 1024, 0.02 + 0.004 * random.random() + rows * 2e-5)
        seen.append(rows)
    assert np.mean(seen[100:]) > 400


def test_a_slice_that_loads_kernels_is_no_reason_to_sleep_for_a_minute():
    pace = Pace(0.1, lambda: 0.0)
    assert pace.rest(0.01) == pytest.approx(0.09) and pace.rest(7.0) == pytest.approx(9 * LONGEST)
    assert pace.rows(LEAST_ROWS, LEAST_ROWS, 1024, 7.0) > LEAST_ROWS, "and none for small slices"


def test_slices_grow_again_where_others_made_all_of_them_longer():
    pace, rows = Pace(0.1, lambda: 0.0), LEAST_ROWS
    for launch in (0.02, 0.04, 0.02):
        for _ in range(100):
            rows = pace.rows(rows, rows, 1024, launch + rows * 1e-5)
        assert rows > 200
    assert pace.rows(40, rows, 1024, 0.0204) == rows, "the end of a step says little"
