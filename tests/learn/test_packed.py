"""Packed branches: loss and gradient are the sum over single paths, which the unrolling of one text computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.learn import branch_loss as module
from kvasir.learn import packed as packing
from kvasir.learn.branch_loss import branch_loss
from kvasir.learn.losses import DISCOUNT, Target
from kvasir.learn.packed import pack
from kvasir.learn.trace import PLAIN, REJECTED
from tests.learn.handmade import STEPS, head_for, nano, trace_of

LAM = 0.25


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base():
    return nano()


def paths_of(trace, depth):
    """(tokens from the root's next on, root row, judge row) of every guess, by following parents alone."""
    committed = [row for row in range(trace.num_rows) if trace.kinds[row] != REJECTED]
    at = {int(trace.positions[row]): row for row in committed}
    for row in range(trace.num_rows):
        position = int(trace.positions[row])
        if trace.kinds[row] != REJECTED:
            for root in range(max(trace.prompt - 1, position - depth), position):
                if all(p in at for p in range(root, position)):
                    yield [int(trace.row_tokens[at[p]]) for p in range(root + 1, position + 1)], at[root], row
        else:
            tokens, here = [int(trace.row_tokens[row])], row
            while trace.kinds[here] != PLAIN:
                here = int(trace.parents[here])
                tokens.insert(0, int(trace.row_tokens[here]))
            root = int(trace.parents[here])
            if root >= 0 and len(tokens) <= depth and trace.positions[root] >= trace.prompt - 1:
                yield tokens, root, row


def sum_of_paths(head, base, traces, lam):
    """The loss of each path alone, as `Head.unroll` computes one text."""
    parts = {False: [], True: []}
    for trace in traces:
        states = trace.tensor()
        for tokens, root, judge in paths_of(trace, head.shape.depth):
            context = [row for row in range(trace.num_rows) if trace.kinds[row] != REJECTED and row <= root]
            known = [int(trace.tokens[trace.positions[row] + 1 - trace.start]) for row in context]
            text = known + tokens[1:]  # rows behind the root are never read
            features = torch.cat([states[context], states[:1].expand(len(tokens) - 1, -1, -1)])[None]
            outputs = list(head.unroll(features, base.normed(features[:, :, -1]), base.embed(torch.tensor([text]))))
            level = len(tokens) - 1
            logits = base.logits(outputs[level][0, len(context) - 1])[None]
            wanted = Target.of(base.logits(base.normed(states[judge, -1])[None]))
            parts[bool(trace.kinds[judge] == REJECTED)].append(wanted.divergence(logits)[0] * DISCOUNT**level)
    loss = torch.stack(parts[False]).mean()
    return loss + lam * torch.stack(parts[True]).mean() if lam and parts[True] else loss, parts


def backward(head, loss):
    """Gradients of all weights."""
    head.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in head.parameters()]


def differs(case):
    """Largest relative difference of loss and gradient between the packed pass and single paths."""
    head, base, traces, wanted, gradients = case
    found = branch_loss(head, base, packing.pack(traces, head.shape.depth), LAM, num_rows=5)
    errors = [abs(float(found.loss) / wanted - 1)]
    errors += [
        float((mine - g).abs().max() / g.abs().max().clamp(min=1e-6))
        for mine, g in zip(backward(head, found.pull), gradients)
    ]
    return max(errors)


@pytest.fixture(scope="module", params=["eagle", "medusa"])
def case(request, base, one_thread):
    """Head, base, traces, and the loss of single paths with its gradients."""
    head = head_for(request.param, base)
    traces = [trace_of(base, head.shape.layers, STEPS[i:], seed=i, prompt=3 + i) for i in (0, 3)]
    wanted, parts = sum_of_paths(head, base, traces, LAM)
    assert len(parts[True]) > 8 and len(parts[False]) > 30
    return head, base, traces, float(wanted.detach()), backward(head, wanted)


def test_packed_loss_and_gradient_are_the_sum_over_single_paths(case):
    assert differs(case) < 1e-5


@pytest.mark.parametrize("multiple", [1, 7, 64])
def test_idle_guesses_change_nothing(case, multiple):
    """Their number is that of a whole multiple: what is multiplied has few shapes."""
    head, base, traces, wanted, gradients = case
    packed = pack(traces, head.shape.depth)
    even = packing.evened(packed, multiple)
    assert len(even.committed) - len(packed.committed) == -len(packed.committed) % multiple
    assert all(len(level.root) % multiple == 0 and len(level.root) == len(level.judge) for level in even.levels)
    found = branch_loss(head, base, packed, LAM, num_rows=multiple, multiple=multiple)
    assert float(found.loss) == pytest.approx(wanted, rel=1e-5)
    plain = branch_loss(head, base, packed, LAM)
    assert found.counts == plain.counts and torch.allclose(found.nats, plain.nats, rtol=1e-4)
    for mine, g in zip(backward(head, found.pull), gradients):
        assert float((mine - g).abs().max() / g.abs().max().clamp(min=1e-6)) < 1e-5


@pytest.mark.parametrize("case", ["eagle"], indirect=True)
def test_idle_rows_of_a_real_text_are_noticed(case, monkeypatch):
    """The control: rows that belong to the first text are seen by its guesses. (Medusa's see no rows but their own.)"""
    head, base, traces, wanted, _ = case

    def of_the_first_text(packed, multiple, real=packing.evened):
        even = real(packed, multiple)
        return replace(even, text=even.text.clip(min=0))

    monkeypatch.setattr(module, "evened", of_the_first_text)
    found = branch_loss(head, base, pack(traces, head.shape.depth), LAM, multiple=64)
    assert float(found.loss) != pytest.approx(wanted, rel=1e-4)


def test_paths_are_attended_without_plans_for_their_shapes(base, monkeypatch):
    """cuDNN would make one for each, in every slice."""
    head, allowed = head_for("eagle", base), []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, **kwargs):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    branch_loss(head, base, pack([trace_of(base, head.shape.layers, STEPS)], head.shape.depth), LAM)
    assert len(allowed) == head.shape.depth and not any(allowed)
    noted(*torch.zeros(3, 1, 1, 4, 8))
    assert allowed[-1]


def test_rows_that_are_missing_end_paths_alone(case):
    """A prefix from the cache, and a gap in the middle, as steps without traces leave it. (Along one text ``unroll``
    counts positions without gaps, so eagle has none.)"""
    head, base, traces = case[:3]
    found = []
    for trace in traces:
        gone = {0, 1, *([] if head.kind == "eagle" else [int((trace.kinds == PLAIN).nonzero()[0][-2])])}
        kept = [row for row in range(trace.num_rows) if row not in gone]
        place = {row: i for i, row in enumerate(kept)} | dict.fromkeys([*gone, -1], -1)
        rows = {n: getattr(trace, n)[kept] for n in ("states", "positions", "row_tokens", "kinds")}
        parents = trace.parents[kept]
        found.append(
            replace(trace, **rows, parents=(parents * 0 + [place[int(p)] for p in parents]).astype(parents.dtype))
        )
        found[-1].check()
    with torch.no_grad():
        wanted, _ = sum_of_paths(head, base, found, LAM)
    loss = branch_loss(head, base, pack(found, head.shape.depth), LAM).loss
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_a_causal_mask_in_place_of_the_branch_mask_is_noticed(case, monkeypatch):
    head, *_ = case

    def causal(placed):
        rows, count = len(placed.committed), 0
        masks = []
        for j, level in enumerate(placed.levels):
            count = count + len(level.root) if j else 0
            here = torch.arange(len(level.root)) + (rows + count - len(level.root) if j else 0)
            masks.append(here[:, None] >= torch.arange(rows + count))
        return masks

    monkeypatch.setattr(packing, "branch_mask", causal)
    if head.kind == "medusa":  # its guesses see no other rows
        assert differs(case) < 1e-5
    else:
        assert differs(case) > 1e-2


def test_a_target_from_the_accepted_path_is_noticed(case, monkeypatch):
    """Mutation: a rejected row is judged by the committed row at its position."""

    def wrong(traces, depth, rejected=True):
        packed = pack(traces, depth, rejected)
        positions = torch.from_numpy(packed.positions)
        levels = []
        for level in packed.levels:
            judge = level.judge.copy()
            for i in level.rejected.nonzero()[0]:
                same = (packed.text == packed.text[level.root[i]]) & (positions == positions[level.root[i]] + 1).numpy()
                judge[i] = packed.committed[same.nonzero()[0][0]]
            levels.append(replace(level, judge=judge))
        return replace(packed, levels=tuple(levels))

    monkeypatch.setattr(packing, "pack", wrong)
    assert differs(case) > 1e-3


def test_only_committed_rows_count_without_rejected_ones(case):
    head, base, traces = case[:3]
    both = branch_loss(head, base, pack(traces, head.shape.depth), 0.0)
    alone = branch_loss(head, base, pack(traces, head.shape.depth, rejected=False), 0.25)
    assert float(both.loss) == pytest.approx(float(alone.loss), rel=1e-5)
    assert torch.allclose(both.nats, alone.nats, rtol=1e-5) and both.counts == alone.counts
    assert float(branch_loss(head, base, pack(traces, head.shape.depth), 1.0).loss) > float(both.loss)


def test_a_trace_without_a_reply_teaches_nothing(base):
    head = head_for("medusa", base)
    with pytest.raises(ValueError, match="nothing to learn"):
        branch_loss(head, base, pack([trace_of(base, head.shape.layers, [])], 4), LAM)
    assert module.ROWS > 0
