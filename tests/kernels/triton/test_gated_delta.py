"""Steps over state pages in Triton's interpreter or on a GPU, compared with the plain recurrence: the results, and all
planes of the pages."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import gated_delta
from kvasir.kernels.gated_delta import Weights, step, step_reference
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import LOOK_AHEAD, GatedDeltaSpec, NormSpec
from kvasir.types import CacheGroup

PAGES = 9
# Lengths of the spans of each sequence; a step has one span of each. Spans of more than 16 rows change the page.
LENGTHS = ([3, 1, 18, 1, 2], [17, 2, 1, 1, 1], [1, 1, 1, 1, 1])
SPECS = {
    "even": GatedDeltaSpec(1, 2, 8, 16, NormSpec()),
    "odd": GatedDeltaSpec(1, 1, 12, 40, NormSpec()),
    "three taps": GatedDeltaSpec(2, 2, 8, 8, NormSpec(), taps=3),
}


class World:
    """Three sequences, each with two pages, in pools with other bytes in every page."""

    def __init__(self, spec: GatedDeltaSpec, dtype: torch.dtype, device: str) -> None:
        def drawn(*shape: int, seed: int) -> torch.Tensor:
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)

        self.group = CacheGroup("state", (0,), kind="state", states=(spec.state(),))
        self.pool = KVPool([self.group], PlainCodec(), [PAGES], 16, device, dtype)
        self.weights = Weights(
            drawn(spec.mixed, spec.taps, seed=1).to(dtype),
            drawn(spec.num_value_heads, seed=2),
            drawn(spec.num_value_heads, seed=3),
            spec.num_key_heads,
        )
        width = spec.mixed + 2 * spec.num_value_heads
        self.rows = [drawn(sum(lengths), width, seed=4 + i).to(dtype) for i, lengths in enumerate(LENGTHS)]
        self.device = device

    def run(self, kernel, drafts: int = 0) -> torch.Tensor:
        """All results of the real rows. Every decode has so many drafts, of which none is right."""
        tables, done, found = [(1, 2), (3, 4), (5, 6)], [0, 0, 0], [[], [], []]
        for turn in range(len(LENGTHS[0])):
            own = [lengths[turn] for lengths in LENGTHS]
            parts = [rows[at : at + n] for rows, at, n in zip(self.rows, done, own)]
            parts = [torch.cat((p, torch.randn_like(p[:1]).repeat(drafts, 1))) if len(p) == 1 else p for p in parts]
            lengths = [len(p) for p in parts]
            got = kernel(self, torch.cat(parts), tables, done, lengths).split(lengths)
            for i, n in enumerate(own):
                found[i].append(got[i][:n])
            tables = [t[::-1] if n > LOOK_AHEAD else t for t, n in zip(tables, lengths)]
            done = [at + n for at, n in zip(done, own)]
        return torch.cat([torch.cat(parts) for parts in found])


def by_kernel(world: World, rows, tables, starts, lengths):
    numbers = [torch.tensor(x, dtype=torch.int32, device=world.device) for x in (tables, starts)]
    row_start = torch.tensor([0, *lengths], dtype=torch.int32, device=world.device).cumsum(0).int()
    planes = world.pool.layer(0).planes
    return step(rows, planes, *numbers, row_start, list(starts), lengths, world.weights, exact=True)


def by_reference(world: World, rows, tables, starts, lengths):
    return step_reference(rows, world.pool.layer(0).planes, tables, list(starts), lengths, world.weights, True)


def compare(spec: GatedDeltaSpec, dtype: torch.dtype, device: str, near: float = 1e-5) -> None:
    worlds = [World(spec, dtype, device) for _ in range(2)]
    got, want = (world.run(run) for world, run in zip(worlds, (by_kernel, by_reference)))
    torch.testing.assert_close(got, want, atol=near, rtol=1e-4)
    for name, plane in worlds[0].pool.layer(0).planes.items():
        other = worlds[1].pool.layer(0).planes[name]
        said = f"plane {name} differs"
        torch.testing.assert_close(plane[1:7], other[1:7], atol=near, rtol=1e-4, msg=said)


@pytest.mark.parametrize("name", SPECS)
def test_steps_against_the_reference(name, device):
    compare(SPECS[name], torch.float32, device)


def test_rows_in_half_precision(device):
    compare(SPECS["even"], torch.float16, device)


def test_rejected_drafts_change_no_bit(device):
    plain = World(SPECS["even"], torch.float32, device).run(by_kernel)
    assert torch.equal(World(SPECS["even"], torch.float32, device).run(by_kernel, drafts=3), plain)


def test_a_state_without_decay_would_fail(monkeypatch, device):
    """The mutation that the comparison must catch."""
    real = gated_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact):
        still = Weights(weights.conv_CJ, weights.log_decay_H - 9, weights.bias_H, weights.key_heads)
        return real(rows, planes, pages, starts, lengths, still, exact)

    monkeypatch.setitem(globals(), "step_reference", wrong)
    with pytest.raises(AssertionError):
        compare(SPECS["even"], torch.float32, device)
