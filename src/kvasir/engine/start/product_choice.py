"""Which backend multiplies by which coded weights: the one that was named, or the quickest by the clock.

The choice is made for each shape class (format, outputs, inputs, gated) once the weights are loaded. A backend from
outside and the format's own products multiply ``ROWS`` rows by copies of such a weight that do not fit in the cache of
a GPU together, as CUDA graphs. The smallest product of the times wins; ours wins where the two are within ``CLOSE``.
Exact mode keeps our own products: the bits of a row may not depend on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.layers.product_backend import BACKENDS, OWN, ProductBackend, ProductShape, shape_of
from kvasir.layers.weight_format import PLAIN, Weight
from kvasir.layers.weights import Placement
from kvasir.logs import log
from kvasir.models.decoder import Decoder
from kvasir.models.random_weights import draw_random

ROWS = (1, 8, 64, 1024)  # rows of the products that are timed
CLOSE = 1.03  # the products of times within this factor count as equal
COLD_BYTES = 128 << 20  # of copies of a weight: more than a GPU's cache
LAPS = 5
Clock = Callable[[list[Weight], int], float]  # seconds of one product, of so many rows


@dataclass(slots=True)
class ProductChoice:
    """The backends of a model's products. ``settle`` times them, where there is something to time, and hands them
    their weights.

    ``timed``: the choice as a value of ``--product-backend``, where the clock made it; empty: it did not."""

    model: Decoder
    max_rows: int
    candidates: list[ProductBackend]  # from outside; the format's own products stand by
    named: bool
    clock: Clock | None = None
    chosen: dict[ProductShape, ProductBackend] = field(default_factory=dict)
    timed: str = ""
    settled: bool = False

    @torch.inference_mode()
    def settle(self) -> None:
        """Time the candidates, hand each its weights, and compile its kernels. Call it once the weights are loaded,
        before anything is captured. A second call does nothing."""
        if self.settled:
            return
        self.settled = True
        if not self.candidates:
            return
        told: list[str] = []
        won: dict[str, dict[ProductShape, ProductBackend]] = {}
        for shape, weights in shapes_of(self.model).items():
            able = [b for b in self.candidates if not b.why_not_weight(weights[0])]
            if not able:
                continue
            if self.named:
                self.chosen[shape] = able[0]
                continue
            times = self._times(shape, weights[0], able)
            told.append(f"{shape}: {', '.join(f'{name} {told_times(found)}' for name, found in times.items())}")
            backend = quickest(times, able)
            if backend is not None:
                won.setdefault(backend.name, {})[shape] = backend
        if not self.named:
            # One switch names one backend, so one takes shapes: the one that won most of them.
            self.chosen = max(won.values(), key=len, default={})
            self.timed = spec_of(self.chosen) if self.chosen else OWN
            log.info(
                "products by the clock, in us for %s rows: %s; so --product-backend %s",
                ", ".join(map(str, self.rows())),
                "; ".join(told) or "nothing to time",
                self.timed,
            )
        if self.chosen:
            self._hand_over()

    def rows(self) -> tuple[int, ...]:
        """Rows of the products that are timed."""
        return tuple(rows for rows in ROWS if rows <= max(1, self.max_rows))

    def fingerprint(self) -> tuple:
        """The part of the prefix key: backends round scales and add in another order. Empty: all products are ours."""
        return tuple(sorted((str(shape), backend.name) for shape, backend in self.chosen.items()))

    def _times(self, shape: ProductShape, weight: Weight, able: list[ProductBackend]) -> dict[str, list[float]]:
        """Seconds of a product by backend, the formats' own first. One that fails is left out with a warning."""
        clock = self.clock or seconds_of
        copies = max(2, min(16, math.ceil(COLD_BYTES / max(1, weight.num_bytes))))
        copies = copies if weight.place.device.type == "cuda" else 1
        found = {}
        for backend in (None, *able):
            name = OWN if backend is None else backend.name
            try:
                made = [copy_of(weight) for _ in range(copies)]
                for one in made if backend is not None else ():
                    backend.take(one, trial=True)
                found[name] = [clock(made, rows) for rows in self.rows()]
            except Exception as e:
                if backend is None:
                    raise
                log.warning(
                    "product backend '%s' is left out for %s: it failed when it was timed (%s: %s)",
                    name, shape, type(e).__name__, e,
                )  # fmt: skip
            made = []
        return found

    def _hand_over(self) -> None:
        """Give every backend its weights, one at a time, and run each kind of product once."""
        begun, warmed, total = time.perf_counter(), set(), 0
        found = shapes_of(self.model)
        for shape, backend in self.chosen.items():
            for weight in found[shape]:
                try:
                    backend.take(weight)
                    total += 1
                    kind = backend.kernels(weight)
                    if kind not in warmed:
                        warmed.add(kind)
                        log.info("compiling the products of '%s' for %s", backend.name, shape)
                        warm(weight, self.max_rows)
                except Exception as e:  # a compiler that fails, a package of another version
                    raise ConfigError(
                        f"product backend '{backend.name}' failed for {shape} ({type(e).__name__}: {e}). Use "
                        f"--product-backend {OWN}."
                    ) from e
        if self.model.place.device.type == "cuda":
            torch.cuda.synchronize(self.model.place.device)
            torch.cuda.empty_cache()
        left = sorted({str(s) for s in found if s not in self.chosen and s.layout[0] != PLAIN})
        log.info(
            "%d weights were handed to %s in %.1f s%s",
            total,
            ", ".join(sorted({b.name for b in self.chosen.values()})),
            time.perf_counter() - begun,
            f"; {', '.join(left)} stay with our own products" if left else "",
        )


def choose_products(spec: str, model: Decoder, max_rows: int, clock: Clock | None = None) -> ProductChoice:
    """The choice for ``spec``, a value of ``--product-backend``. Raises ConfigError with every reason where the named
    backend can take none of the model's weights."""
    place = model.place
    if spec == "auto":
        return ProductChoice(model, max_rows, automatic(place, model), False, clock)
    backend = technique.load(BACKENDS, spec, ProductBackend)
    if backend.ours_alone:
        return ProductChoice(model, max_rows, [], True)
    reasons = backend.why_not(place)
    if not reasons:
        found = {str(shape): backend.why_not_weight(weights[0]) for shape, weights in shapes_of(model).items()}
        if all(found.values()):
            reasons = [f"{shape}: {why}" for shape, why in found.items()]
    if reasons:
        raise ConfigError(
            f"product backend '{spec}' cannot serve this model here: {'; '.join(reasons)}. Use --product-backend {OWN}."
        )
    return ProductChoice(model, max_rows, [backend], True, clock)


def automatic(place: Placement, model: Decoder) -> list[ProductBackend]:
    """The backends from outside that ``auto`` may time here: those that can take a weight."""
    if not timeable(place) or all(s.layout[0] == PLAIN for s in shapes_of(model)):
        return []
    found = technique.of_all(BACKENDS, lambda name: technique.load(BACKENDS, name, ProductBackend))
    weights = [weights[0] for weights in shapes_of(model).values()]
    return [
        backend
        for backend in found
        if not backend.ours_alone
        and not backend.why_not(place)
        and not all(backend.why_not_weight(weight) for weight in weights)
    ]


def timeable(place: Placement) -> bool:
    """Whether there is anything to choose from: backends from outside serve GPUs, and exact mode times nothing."""
    return place.device.type == "cuda" and not place.exact


def shapes_of(model: Decoder) -> dict[ProductShape, list[Weight]]:
    """The model's weights by shape class, experts left out."""
    found: dict[ProductShape, list[Weight]] = {}
    for weight in model.weights():
        if weight.count is None:
            found.setdefault(shape_of(weight), []).append(weight)
    return found


def quickest(times: dict[str, list[float]], able: list[ProductBackend]) -> ProductBackend | None:
    """The backend with the smallest product of times; None: the formats' own."""
    product = {name: math.prod(found) for name, found in times.items()}
    best = min(product, key=product.__getitem__)
    if best == OWN or product[OWN] <= CLOSE * product[best]:
        return None
    return next(backend for backend in able if backend.name == best)


def spec_of(chosen: dict[ProductShape, ProductBackend]) -> str:
    """The value of ``--product-backend`` by which the backend takes these shapes again."""
    name = next(iter(chosen.values())).name
    return f"{name}:shapes={'+'.join(dict.fromkeys(f'{s.num_outputs}x{s.num_inputs}' for s in chosen))}"


def told_times(found: list[float]) -> str:
    """Times as the log has them."""
    return " ".join(f"{1e6 * seconds:.1f}" for seconds in found)


def copy_of(weight: Weight) -> Weight:
    """A weight of the same kind, filled with random numbers."""
    found = object.__new__(Weight)
    vars(found).update(vars(weight), made=None, copies=False)
    found.planes = {name: torch.empty_like(plane) for name, plane in weight.planes.items()}
    draw_random(found.slots(), torch.Generator(weight.place.device).manual_seed(0))
    return found


def inputs_of(weight: Weight, rows: int) -> torch.Tensor:
    """Inputs of a product."""
    return torch.ones(rows, weight.num_inputs, device=weight.place.device, dtype=weight.place.dtype)


def warm(weight: Weight, max_rows: int) -> None:
    """Multiply 1, 2, 4 and so on up to ``max_rows`` rows, so that every kernel is compiled and loaded."""
    for rows in sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)}):
        weight(inputs_of(weight, rows))


def seconds_of(weights: list[Weight], rows: int) -> float:
    """Seconds of one product of so many rows with each of the weights in turn, as a CUDA graph; the least of
    ``LAPS``."""
    x_TK = inputs_of(weights[0], rows)
    activation = "silu" if shape_of(weights[0]).gated else None

    def run() -> None:
        for weight in weights:
            weight(x_TK, activation=activation)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    least = math.inf
    for _ in range(LAPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) * 1e-3 / len(weights))
    return least
