"""Block verification equals its enumeration over every draft, every outcome of the coins and the joint of all tokens.
Rules that are almost right fail.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvasir.decoding import max_accept
from kvasir.types import Request, SamplingParams, Sequence

V = 4
Table = dict[tuple[int, ...], torch.Tensor]


def table(depth: int, seed: int, near: Table | None = None) -> Table:
    """Return a distribution after every prefix of up to ``depth`` tokens. ``near``: keep it close to this one."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for prefix in itertools.chain.from_iterable(itertools.product(range(V), repeat=n) for n in range(depth + 1)):
        noise = torch.randn(V, generator=rng, dtype=torch.float64)
        found[prefix] = (noise if near is None else near[prefix].log() + 0.8 * noise).softmax(0)
    return found


def of_one(
    p: Table, q: Table, drafts: tuple[int, ...], pad: int = 0, rule=max_accept.verify
) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(drafts)
    rows = [drafts[:i] for i in range(count + 1)]
    p_HV = torch.stack([p[r] for r in rows] + [torch.full((V,), math.nan, dtype=torch.float64)] * pad)
    q_GV = torch.stack([q[r] for r in rows[:-1]] + [q[rows[-2]]] * pad)
    drafts_G = torch.tensor([*drafts, *drafts[-1:] * pad])
    h_BG, weights_BHV = rule(p_HV[None], q_GV[None], drafts_G[None], torch.tensor([count]))
    return h_BG[0], weights_BHV[0]


def joint(p: Table, q: Table, length, depth: int, rule=max_accept.verify) -> tuple[dict, float]:
    """Return the probability of every output of ``depth`` + 1 tokens, and the mean number of accepted drafts.

    ``length(drafts)``: how many drafts are verified; None: all drawn so far, and draw on."""
    found = dict.fromkeys(itertools.product(range(V), repeat=depth + 1), 0.0)
    mean = 0.0

    def emit(prefix: tuple[int, ...], chance: float) -> None:
        rest = depth + 1 - len(prefix)
        for tail in itertools.product(range(V), repeat=rest):
            found[prefix + tail] += chance * math.prod(
                float(p[(prefix + tail)[: len(prefix) + i]][t]) for i, t in enumerate(tail)
            )

    def end(drafts: tuple[int, ...], chance: float) -> None:
        nonlocal mean
        h, weights = of_one(p, q, drafts, rule=rule) if drafts else (torch.zeros(0), p[()][None])
        above = 1.0
        for tau in range(len(drafts), -1, -1):
            here = above * (float(h[tau - 1]) if tau else 1.0)
            above -= here
            mean += chance * here * tau
            for token, share in enumerate((weights[tau] / weights[tau].sum()).tolist()):
                if here * share:
                    emit(drafts[:tau] + (token,), chance * here * share)

    def draw(drafts: tuple[int, ...], chance: float) -> None:
        count = length(drafts)
        if count is not None:
            return end(drafts[:count], chance)
        for token in range(V):
            draw((*drafts, token), chance * float(q[drafts][token]))

    draw((), 1.0)
    return found, mean


def error(p: Table, found: dict) -> float:
    return max(
        abs(chance - math.prod(float(p[out[:i]][t]) for i, t in enumerate(out))) for out, chance in found.items()
    )


def whole(depth: int):
    return lambda drafts: depth if len(drafts) == depth else None


def one_by_one(p: Table, q: Table, depth: int) -> float:
    """Return the mean number of accepted drafts of the rule that looks at one draft at a time."""
    mean, level = 0.0, {(): 1.0}
    for _ in range(depth):
        level = {
            (*prefix, t): chance * min(float(p[prefix][t]), float(q[prefix][t]))
            for prefix, chance in level.items()
            for t in range(V)
        }
        mean += sum(level.values())
    return mean


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_joint_is_the_models_and_no_fewer_are_accepted(depth, seed):
    p = table(depth, seed)
    for q in (table(depth, 100 + seed), table(depth, 200 + seed, near=p), p):
        found, mean = joint(p, q, whole(depth), depth)
        assert error(p, found) < 1e-12
        assert mean >= one_by_one(p, q, depth) - 1e-12
    assert mean == pytest.approx(depth), "of its own draws, all are accepted"


@pytest.mark.parametrize("seed", range(3))
def test_a_length_that_is_known_before_the_draw_bends_nothing(seed):
    """Cut a chain after its first unlikely draft, which is still verified."""
    p, q = table(3, seed), table(3, 50 + seed)

    def stopping(drafts):
        stop = len(drafts) == 3 or drafts and float(q[drafts[:-1]][drafts[-1]]) < 0.2
        return len(drafts) if stop else None

    assert error(p, joint(p, q, stopping, 3)[0]) < 1e-12


def test_golden_pair():
    """A single draft is accepted with probability 1 - TV, as by any optimal rule."""
    p, q = (
        {prefix: torch.tensor(row, dtype=torch.float64) for prefix in [(), *((i,) for i in range(V))]}
        for row in ((0.5, 0.3, 0.15, 0.05), (0.35, 0.4, 0.05, 0.2))
    )
    assert joint(p, q, whole(1), 1)[1] == pytest.approx(0.75)


def rest_of_p(p, q, drafts, lengths):
    return max_accept.verify(p, q, drafts, lengths)[0], p


def rest_not_scaled(p, q, drafts, lengths):
    h, weights = max_accept.verify(p, q, drafts, lengths)
    return h, torch.cat(
        [torch.where(weights[:, :-1] == p[:, :-1], p[:, :-1], (p[:, :-1] - q).clamp(min=1e-300)), weights[:, -1:]], 1
    )


def q_of_another_temperature(p, q, drafts, lengths):
    return max_accept.verify(p, (1.25 * q.log()).softmax(-1), drafts, lengths)


def row_off_by_one(p, q, drafts, lengths):
    return max_accept.verify(p.roll(1, 1), q, drafts, lengths)


def token_wise_coins(p, q, drafts, lengths):
    """A mutation that uses the chance of one draft in place of the block's."""
    _, weights = max_accept.verify(p, q, drafts, lengths)
    return (p[:, :-1].gather(2, drafts[..., None]) / q.gather(2, drafts[..., None]))[..., 0].clamp(max=1), weights


@pytest.mark.parametrize(
    "mutant", [rest_of_p, rest_not_scaled, q_of_another_temperature, row_off_by_one, token_wise_coins]
)
def test_what_is_nearly_right_is_seen(mutant):
    p, q = table(2, 7), table(2, 8)
    assert error(p, joint(p, q, whole(2), 2, rule=mutant)[0]) > 1e-3


def test_dropping_an_unlikely_draft_is_seen():
    """The rule of predictability: whether a draft is verified may not depend on its value."""
    p, q = table(2, 7), table(2, 8)

    def trimmed(drafts):
        if drafts and float(q[drafts[:-1]][drafts[-1]]) < 0.2:
            return len(drafts) - 1
        return 2 if len(drafts) == 2 else None

    assert error(p, joint(p, q, trimmed, 2)[0]) > 1e-3


def test_padding_and_impossible_drafts():
    p, q = table(2, 1), table(2, 2)
    h, weights = of_one(p, q, (1, 2))
    padded_h, padded = of_one(p, q, (1, 2), pad=2)
    assert torch.equal(padded_h[:2], h) and not padded_h[2:].any() and torch.equal(padded[:3], weights)
    p[()] = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)  # a mask, behind which nothing has to make sense
    p[1,] = torch.full((V,), math.nan, dtype=torch.float64)
    h, weights = of_one(p, q, (1, 2))
    assert not h.any() and weights[0, 1] == 0 and bool(torch.isfinite(weights[0]).all())


def emitted(device: str) -> list[int]:
    rng, vocab = torch.Generator().manual_seed(4), 500
    seqs = [
        Sequence(Request(id=str(i), prompt_ids=[1], params=SamplingParams(), seed=i, max_tokens=4)) for i in range(20)
    ]
    lengths = [1 + i % 5 for i in range(20)]
    final = torch.randn(sum(lengths) + 20, vocab, generator=rng)
    found, rows, at = [], [], 0
    for seq, count in zip(seqs, lengths):
        weights = final[at : at + count] + 0.3 * torch.randn(count, vocab, generator=rng)
        drafts = weights.softmax(-1).multinomial(1, generator=rng)[:, 0].tolist()
        found.append(max_accept.Block(seq, at, 7, drafts, torch.cat([weights, weights[:1]]).to(device)))
        rows.append(at)
        at += count + 1
    tokens = torch.full((at,), -1, device=device)
    max_accept.accept(found, rows, final.to(device), tokens)
    for block in found:  # drafts, then one token, then what was there
        own = tokens[block.first : block.first + len(block.drafts) + 1].tolist()
        tau = next((i for i, (a, b) in enumerate(zip(own, block.drafts)) if a != b), len(block.drafts))
        assert own[tau] >= 0 and set(own[tau + 1 :]) <= {-1}
    return tokens.tolist()


def test_many_blocks_of_many_lengths():
    tokens = emitted("cpu")
    assert 0 < tokens.count(-1) < 40


@pytest.mark.gpu
def test_a_gpu_accepts_the_same():
    differ = sum(a != b for a, b in zip(emitted("cpu"), emitted("cuda")))
    assert differ <= 1, "noise there differs in its last bits"


def test_noise_is_fresh_for_every_use_and_position():
    seq = Sequence(Request(id="a", prompt_ids=[1], params=SamplingParams(), seed=5, max_tokens=4))
    streams = {max_accept.fresh_stream(seq, at, use) for at in range(50) for use in (b"rest", b"draft")} | {seq.stream}
    assert len(streams) == 101
    u = max_accept.coins(seq, 3, 40)
    assert len(u) == 40 and (u >= 0).all() and (u < 1).all() and (max_accept.coins(seq, 3, 5) == u[:5]).all()
    assert len({*u.tolist(), *max_accept.coins(seq, 4, 40).tolist()}) == 80
