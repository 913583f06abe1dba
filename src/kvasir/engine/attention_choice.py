"""Which attention backend serves a model: the one that was named, the only one that can, or the quickest, by the clock.

Plain torch and whatever else has rank 0 stand back where a ranked backend can serve. Where several ranked ones can, each attends a step of
decodes and a chunk of a prompt, with the model's own shapes, over a small cache that is freed again. The least product of the two times
wins: to be a tenth slower at the one, a backend must be a tenth quicker at the other. Where there is nothing to choose, nothing is timed. In
exact mode nothing is, either: its bits hold across restarts and machines of a kind, and the clock does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from kvasir import technique
from kvasir.attention.backend import BACKENDS, AttentionBackend, AttentionSpec, Site
from kvasir.engine.rehearsal import batch_of
from kvasir.engine.sizing import pages_for
from kvasir.errors import ConfigError
from kvasir.kernels.compile_ahead import compiling
from kvasir.kv.codec import Codec, LayerCache
from kvasir.kv.pool import KVPool
from kvasir.logs import log
from kvasir.types import CacheGroup

DECODES, PROMPT = [(2047, 1)] * 8, [(2048, 2048)]  # spans (positions before, rows)
LAYERS = 16  # attend by one plan, as in a model
ROUNDS, LAPS = 3, 3  # candidates take turns: a GPU that was idle takes a while to run at its full clock
CLOSE = 1.05  # products of times that are no difference; a restart should not choose anew by chance

Times = dict[AttentionBackend, tuple[float, float]]  # seconds a layer, to decode and to read a prompt


@dataclass(frozen=True, slots=True)
class Choice:
    backend: AttentionBackend  # prepared
    why: str
    timed: bool = False


def choose_backend(name: str, site: Site, codec: Codec) -> Choice:
    """Raises ConfigError with every reason, where the named backend cannot serve ``site``, or none can."""
    choice = _automatic(site, codec) if name == "auto" else Choice(_named(name, site), "as asked for")
    choice.backend.prepare(site)
    return choice


def _named(name: str, site: Site) -> AttentionBackend:
    backend = technique.load(BACKENDS, name, AttentionBackend)
    if reasons := backend.why_not(site):
        raise ConfigError(f"attention backend '{name}' cannot serve this model here: {'; '.join(reasons)}. Use --attention-backend auto.")
    return backend


def _automatic(site: Site, codec: Codec) -> Choice:
    found = technique.of_all(BACKENDS, lambda n: technique.load(BACKENDS, n, AttentionBackend))
    able = [b for b in found if not b.why_not(site)]
    if not able:
        raise ConfigError("no attention backend can serve this model here: " + "; ".join(f"{b.name}: {', '.join(b.why_not(site))}" for b in found))
    ready = [b for b in able if b.rank and not b.why_only_named(site)]
    first = max(ready or able, key=lambda b: b.rank)
    if not ready:
        if site.device == "cuda" and (others := [b for b in found if b not in able]):
            nearest = min(others, key=lambda b: len(b.why_not(site)))
            log.warning("attention runs in plain torch, which is slow on a GPU: '%s' %s", nearest.name, "; ".join(nearest.why_not(site)))
        return Choice(first, "no other is a candidate")
    if len(ready) == 1:
        return Choice(first, "the only candidate")
    if site.exact:
        return Choice(first, "by rank: exact mode does not choose by the clock")
    return quickest(ready, time_all(ready, site, codec))


def quickest(ready: list[AttentionBackend], times: Times) -> Choice:
    """Backends whose decode steps no CUDA graph can hold come last: a graph saves more than a kernel. Among those that are as quick as
    each other, the highest rank."""
    if not times:
        return Choice(max(ready, key=lambda b: b.rank), "by rank: none could be timed")
    graphed = {b: decode * prompt for b, (decode, prompt) in times.items() if b.graphs == any(b.graphs for b in times)}
    chosen = max((b for b, product in graphed.items() if product <= CLOSE * min(graphed.values())), key=lambda b: b.rank)
    told = ", ".join(f"{b.name} {1e6 * decode:.0f} and {1e6 * prompt:.0f}" for b, (decode, prompt) in times.items())
    return Choice(chosen, f"by the clock, in us a layer for {len(DECODES)} decodes and for {PROMPT[0][1]} rows of a prompt: {told}", timed=True)


def time_all(backends: Iterable[AttentionBackend], site: Site, codec: Codec) -> Times:
    """Of those that can be timed; of the others the log says why not. What it took of the device is given back."""
    times: Times = {b: (float("inf"), float("inf")) for b in backends}
    with compiling():
        for _ in range(ROUNDS):
            for backend in list(times):
                try:
                    decode, prompt = times[backend]
                    now = seconds_of(backend, site, codec)
                    times[backend] = min(decode, now[0]), min(prompt, now[1])
                except Exception as error:  # of a package that nobody asked for, or of a device that is full
                    del times[backend]
                    log.warning("attention backend '%s' is left out: it failed when it was timed (%s: %s)", backend.name, type(error).__name__, error)
    if site.device == "cuda":
        torch.cuda.empty_cache()
    return times


@torch.inference_mode()
def seconds_of(backend: AttentionBackend, site: Site, codec: Codec) -> tuple[float, float]:
    """A layer's decodes and its rows of a prompt; where layers differ, the sum of one of each kind."""
    backend.prepare(site)
    decode, prompt = (sum(_least(_step(backend, spec, site, codec, spans), site.device) for spec in site.specs) / LAYERS
                      for spans in (DECODES, PROMPT))
    return decode, prompt


def _step(backend: AttentionBackend, spec: AttentionSpec, site: Site, codec: Codec, spans: list[tuple[int, int]]) -> Callable[[], None]:
    """Attention of a step: planned once, and run for every layer. Every sequence has pages of its own, or they would be read once for all."""
    pages = pages_for(max(map(sum, spans)), site.page_slots)
    group = CacheGroup("scratch", (0,), spec.num_kv_heads, spec.head_dim, spec.window)
    cache = KVPool([group], codec, [pages * len(spans)], site.page_slots, site.device, site.dtype).layer(0)
    table_SW = torch.arange(pages * len(spans), dtype=torch.int32, device=site.device).view(len(spans), pages)
    q_THD = torch.zeros(sum(rows for _, rows in spans), spec.num_heads, spec.head_dim, dtype=site.dtype, device=site.device)
    sinks_H = torch.zeros(spec.num_heads, device=site.device) if spec.sinks else None
    return partial(_attend, backend, spec, cache, spans, table_SW, q_THD, sinks_H)


def _attend(backend: AttentionBackend, spec: AttentionSpec, cache: LayerCache, spans: list[tuple[int, int]], table_SW: torch.Tensor,
            q_THD: torch.Tensor, sinks_H: torch.Tensor | None) -> None:
    batch = batch_of(spans, (table_SW,))
    backend.plan(batch)
    for _ in range(LAYERS):
        backend.run(q_THD, cache, spec, batch, sinks_H=sinks_H)


def _least(step: Callable[[], None], device: str) -> float:
    """Seconds of the quickest of several laps, after one that compiles what it meets: what else the start does only makes laps longer."""
    step()
    return min(_lap(step, device) for _ in range(LAPS))


def _lap(step: Callable[[], None], device: str) -> float:
    """On a GPU between events, as it runs there."""
    if device != "cuda":
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
