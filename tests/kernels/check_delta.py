"""Steps of the delta rule over state pages by kernels, compared with the plain recurrence."""

from __future__ import annotations

from functools import partial

import torch

from kvasir.kernels.gated_delta import Weights, step, step_reference
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.recurrent_spec import KDASpec
from kvasir.layers.spec import LOOK_AHEAD, GatedDeltaSpec, NormSpec
from kvasir.types import CacheGroup, StepBatch

PAGES = 9
# Lengths of the spans of each sequence; a step has one span of each. Spans of more than 16 rows change the page.
LENGTHS = ([3, 1, 18, 1, 2], [17, 2, 1, 1, 1], [1, 1, 1, 1, 1])
# Chunks end at 64 and 128. Long spans begin at a chunk's end, within a chunk, and behind rows that are not folded,
# which may lie in the chunk before.
LONG = ([64, 70, 3, 40], [66, 17, 1, 50], [5, 2, 140, 1])
SPECS = {
    "even": GatedDeltaSpec(1, 2, 8, 16, NormSpec()),
    "odd": GatedDeltaSpec(1, 1, 12, 40, NormSpec()),
    "three taps": GatedDeltaSpec(2, 2, 8, 8, NormSpec(), taps=3),
    "channels": KDASpec(2, 16, NormSpec()),
    "odd channels": KDASpec(1, 12, NormSpec(), taps=3),
    "many channels": KDASpec(1, 40, NormSpec()),
}
WIDE = {
    "9B": GatedDeltaSpec(16, 32, 128, 128, NormSpec()),
    "27B": GatedDeltaSpec(16, 48, 128, 128, NormSpec()),
    "Kimi Linear": KDASpec(32, 128, NormSpec()),
}


class World:
    """Three sequences, each with two pages, in pools with other bytes in every page."""

    def __init__(
        self, spec: GatedDeltaSpec, dtype: torch.dtype, device: str, lengths=LENGTHS, state_dtype: str = "float32"
    ) -> None:
        def drawn(*shape: int, seed: int) -> torch.Tensor:
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)

        self.group = CacheGroup("state", (0,), kind="state", states=(spec.state(),), state_dtype=state_dtype)
        self.pool = KVPool([self.group], PlainCodec(), [PAGES], 16, device, dtype)
        shapes = {plane.name: plane.shape for plane in spec.state()}
        heads, width, channels = shapes["matrix"][0], shapes["ahead"][1], shapes["tail"][1]
        self.weights = Weights(
            drawn(channels, spec.taps, seed=1).to(dtype),
            drawn(heads, seed=2),
            drawn(width - channels - heads, seed=3),
            getattr(spec, "num_key_heads", heads),
        )
        self.rows = [drawn(sum(own), width, seed=4 + i).to(dtype) for i, own in enumerate(lengths)]
        self.device, self.lengths = device, lengths

    def run(self, kernel, drafts: int = 0) -> torch.Tensor:
        """All results of the real rows. Every decode has so many drafts, of which none is right."""
        count = len(self.lengths)
        tables, done, found = [(1, 2), (3, 4), (5, 6)][:count], [0] * count, [[] for _ in range(count)]
        for turn in range(len(self.lengths[0])):
            own = [lengths[turn] for lengths in self.lengths]
            parts = [rows[at : at + n] for rows, at, n in zip(self.rows, done, own)]
            parts = [torch.cat((p, torch.randn_like(p[:1]).repeat(drafts, 1))) if len(p) == 1 else p for p in parts]
            lengths = [len(p) for p in parts]
            got = kernel(self, torch.cat(parts), tables, done, lengths).split(lengths)
            for i, n in enumerate(own):
                found[i].append(got[i][:n])
            tables = [t[::-1] if n > LOOK_AHEAD else t for t, n in zip(tables, lengths)]
            done = [at + n for at, n in zip(done, own)]
        return torch.cat([torch.cat(parts) for parts in found])


def batch_of(world: World, starts, lengths, **more) -> StepBatch:
    context = torch.tensor(starts, dtype=torch.int32, device=world.device)
    row_start = torch.tensor([0, *lengths], dtype=torch.int32, device=world.device).cumsum(0).int()
    none = torch.zeros(0)
    return StepBatch(none, none, row_start, context, (), (), none, list(starts), list(lengths), **more)


def by_kernel(world: World, rows, tables, starts, lengths, exact=True, **more):
    table = torch.tensor(tables, dtype=torch.int32, device=world.device)
    return step(rows, world.pool.layer(0).planes, table, batch_of(world, starts, lengths), world.weights, exact, **more)


def by_scan(*given, **more):
    return by_kernel(*given, exact=False, **more)


def by_reference(world: World, rows, tables, starts, lengths, **more):
    return step_reference(rows, world.pool.layer(0).planes, tables, list(starts), lengths, world.weights, True, **more)


def compare(
    spec: GatedDeltaSpec, dtype: torch.dtype, device: str, near: float = 1e-5, kernel=by_kernel, waiting: int = 1, **how
) -> None:
    """``waiting``: the rows that wait before a state is written, for the reference; three spans let the kernel wait for
    one, unless it is told."""
    worlds = [World(spec, dtype, device, **how) for _ in range(2)]
    got, want = (world.run(run) for world, run in zip(worlds, (kernel, partial(by_reference, waiting=waiting))))
    torch.testing.assert_close(got, want, atol=near, rtol=1e-4)
    # Numbers of 16 bits round in proportion to what they are.
    rtol = max(1e-4, near)
    for name, plane in worlds[0].pool.layer(0).planes.items():
        other = worlds[1].pool.layer(0).planes[name]
        said = f"plane {name} differs"
        torch.testing.assert_close(plane[1:7], other[1:7], atol=near, rtol=rtol, msg=said)


def wide_lengths() -> tuple[list[int], ...]:
    """Lengths of spans for shapes that people run."""
    return [512, 1, 300, 1], [1, 100, 1, 1], [700, 16, 1, 65]
