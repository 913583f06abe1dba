"""Which attention backend serves a model: the one that was named, the only candidate, or the quickest by the clock.

Each of several candidates attends a step of decodes and a chunk of a prompt, with the model's own shapes, over a small
cache that is freed again. The smallest product of the two times wins, so a tenth lost at one makes up for a tenth won
at the other. Exact mode times nothing: its bits must not change across restarts, and the clock's choice may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir import technique
from kvasir.attention.backend import BACKENDS, AttentionBackend, AttentionSpec, Site
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.start.rehearsal import batch_of
from kvasir.errors import ConfigError
from kvasir.kernels.compile_ahead import compiling
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.logs import log
from kvasir.types import CacheGroup, CacheRow

# The two steps that are timed, as spans of (positions before, rows).
DECODES, PROMPT = [(2047, 1)] * 8, [(2048, 2048)]
# Layers that are attended for each plan.
LAYERS = 16
# Candidates take turns for so many rounds of so many laps: a GPU that was idle takes a while to reach its full clock.
ROUNDS, LAPS = 3, 6
# Products of times within this factor count as equal.
CLOSE = 1.05
Times = dict[AttentionBackend, tuple[float, ...]]  # seconds for each layer: of the decodes, of the prompt


@dataclass(frozen=True, slots=True)
class Choice:
    backend: AttentionBackend  # prepared
    why: str
    timed: bool = False


def choose_backend(name: str, site: Site, codec: Codec) -> Choice:
    """The prepared backend for ``site``. Raises ConfigError with every reason if the named backend, or with ``auto``
    every one, cannot serve it."""
    choice = (
        _automatic(site, codec)
        if name == "auto"
        else Choice(technique.load(BACKENDS, name, AttentionBackend), "as asked for")
    )
    if reasons := reasons_against(choice.backend, site):
        raise ConfigError(
            f"attention backend '{name}' cannot serve this model here: {'; '.join(reasons)}. Use "
            "--attention-backend auto."
        )
    choice.backend.prepare(site)
    return choice


def reasons_against(backend: AttentionBackend, site: Site) -> list[str]:
    """Reasons why the backend cannot serve ``site``; empty: it can."""
    if any(spec.latent is not None for spec in site.specs) and not backend.latents:
        return ["attends to heads of keys and values, and this model caches latents (torch and triton read them)"]
    return backend.why_not(site)


def _automatic(site: Site, codec: Codec) -> Choice:
    found = technique.of_all(BACKENDS, lambda n: technique.load(BACKENDS, n, AttentionBackend))
    able = [b for b in found if not reasons_against(b, site)]
    if not able:
        raise ConfigError(
            "no attention backend can serve this model here: "
            + "; ".join(f"{b.name}: {', '.join(reasons_against(b, site))}" for b in found)
        )
    willing = [b for b in able if not b.why_only_named()] or able  # better such a one than none
    ready = [b for b in willing if b.rank]
    first = max(ready or willing, key=lambda b: b.rank)
    if not ready:
        if site.device == "cuda" and len(able) < len(found):
            nearest = min((b for b in found if b not in able), key=lambda b: len(reasons_against(b, site)))
            log.warning(
                "attention runs in plain torch, which is slow on a GPU: '%s' %s",
                nearest.name,
                "; ".join(reasons_against(nearest, site)),
            )
        return Choice(first, "no other is a candidate")
    if len(ready) == 1 or site.exact:
        return Choice(first, "the only candidate" if len(ready) == 1 else "by rank, in exact mode")
    return quickest(ready, time_all(ready, site, codec))


def quickest(ready: list[AttentionBackend], times: Times) -> Choice:
    """The quickest backend; among equally quick ones that of the highest rank. One without CUDA graphs, which save more
    than a kernel, is chosen only if no other is left."""
    if not times:
        return Choice(max(ready, key=lambda b: b.rank), "by rank: none could be timed")
    product = {b: times[b][0] * times[b][1] for b in times if b.graphs == any(b.graphs for b in times)}
    chosen = max((b for b in product if product[b] <= CLOSE * min(product.values())), key=lambda b: b.rank)
    told = ", ".join(f"{b.name} {1e6 * decode:.0f} and {1e6 * prompt:.0f}" for b, (decode, prompt) in times.items())
    return Choice(
        chosen,
        f"by the clock, in us a layer for {len(DECODES)} decodes and {PROMPT[0][1]} rows of a prompt: {told}",
        timed=True,
    )


def time_all(backends: list[AttentionBackend], site: Site, codec: Codec) -> Times:
    """Times of the backends that can be timed. The log says why the others cannot."""
    times: Times = dict.fromkeys(backends, (torch.inf, torch.inf))
    with compiling():
        for backend in ROUNDS * backends:
            if backend in times:
                try:
                    times[backend] = tuple(map(min, times[backend], seconds_of(backend, site, codec)))
                except Exception as e:  # nobody asked for this package, or the device is full
                    del times[backend]
                    log.warning(
                        "attention backend '%s' is left out: it failed when it was timed (%s: %s)",
                        backend.name,
                        type(e).__name__,
                        e,
                    )
    if site.device == "cuda":
        torch.cuda.empty_cache()  # the memory that is left is measured next, for the pool
    return times


@torch.inference_mode()
def seconds_of(backend: AttentionBackend, site: Site, codec: Codec) -> tuple[float, ...]:
    """Seconds of the two steps for each layer. Where layers differ, one of each kind counts."""
    backend.prepare(site)
    return tuple(
        sum(_least(_step(backend, spec, codec, spans), site.device) for spec in site.specs) / LAYERS
        for spans in (DECODES, PROMPT)
    )


def _step(
    backend: AttentionBackend, spec: AttentionSpec, codec: Codec, spans: list[tuple[int, int]]
) -> Callable[[], None]:
    """A call that attends ``LAYERS`` times. Every sequence has pages of its own, or they would be read once for all."""
    device, dtype, slots = backend.site.device, backend.site.dtype, backend.site.page_slots
    pages = len(spans) * pages_for(max(map(sum, spans)), slots)
    values = (spec.head_dim, 0) if spec.latent is None else (0, spec.result_dim)
    group = CacheGroup("scratch", (0,), (CacheRow(spec.num_kv_heads, spec.head_dim, *values),), spec.window)
    cache = KVPool([group], codec, [pages], slots, device, dtype).layer(0)
    batch = batch_of(spans, (torch.arange(pages, dtype=torch.int32, device=device).view(len(spans), -1),))
    q_THD = torch.zeros(len(batch.input_ids), spec.num_heads, spec.head_dim, dtype=dtype, device=device)
    sinks_H = torch.zeros(spec.num_heads, device=device) if spec.sinks else None

    def step() -> None:
        batch.scratch.clear()
        backend.plan(batch)
        for _ in range(LAYERS):
            backend.run(q_THD, cache, spec, batch, sinks_H=sinks_H)

    return step


def _least(step: Callable[[], None], device: str) -> float:
    """Seconds of the quickest lap, after one that compiles. Other laps are longer because the start does other things,
    too."""
    step()
    return min(_lap(step, device) for _ in range(LAPS))


def _lap(step: Callable[[], None], device: str) -> float:
    if device != "cuda":
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
