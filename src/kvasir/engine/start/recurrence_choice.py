"""Which recurrence backend runs long spans: the one that was named, the only candidate, or the quickest by the clock.

Each of several candidates runs two prompts through one layer of each kind, over states that are freed again. Exact mode
runs no scan, so nothing is timed there.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kvasir import technique
from kvasir.engine.start.rehearsal import batch_of
from kvasir.errors import ConfigError
from kvasir.kernels.compile_ahead import compiling
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.recurrence_backend import RECURRENCES, RecurrenceBackend, RecurrenceSite
from kvasir.logs import log
from kvasir.models.decoder import Decoder
from kvasir.types import CacheGroup

# Spans (positions before, rows) of the step that is timed.
PROMPTS = [(0, 4096)] * 2
# Candidates take turns for so many rounds, each after one run that compiles.
ROUNDS = 5
# Times within this factor count as equal.
CLOSE = 1.05


def choose_recurrence(name: str, model: Decoder, site_of: dict[str, Any], codec: Codec) -> tuple[str, bool]:
    """Give the model's layers a backend: its name ("": no layer runs the delta rule), and whether the clock chose it.

    ``site_of``: device, dtype and exact mode. ``codec``: that of the pool, which states do not use. Raises ConfigError
    with every reason if the named backend cannot serve the model.
    """
    mixers = [block.mixer for block in model.blocks if hasattr(block.mixer, "scan")]
    kinds = {mixer.spec: mixer for mixer in mixers}
    if not mixers:
        if name != "auto":
            raise ConfigError(
                f"recurrence backend '{name}': no layer of this model runs the delta rule. Leave out "
                "--recurrence-backend."
            )
        return "", False
    shapes = tuple(next(p.shape for p in spec.state() if p.name == "matrix") for spec in kinds)
    site = RecurrenceSite(shapes=shapes, **site_of)
    if name != "auto":
        chosen, timed = technique.load(RECURRENCES, name, RecurrenceBackend), False
        if reasons := chosen.why_not(site):
            raise ConfigError(
                f"recurrence backend '{name}' cannot serve this model here: {'; '.join(reasons)}. Use "
                "--recurrence-backend auto."
            )
    else:
        found = technique.of_all(RECURRENCES, lambda n: technique.load(RECURRENCES, n, RecurrenceBackend))
        able = sorted((b for b in found if not b.why_not(site)), key=lambda b: -b.rank)
        times = time_all(able, list(kinds.values()), site, codec) if len(able) > 1 and not site.exact else {}
        chosen, timed = quickest(times) if times else able[0], len(times) > 1
    for mixer in mixers:
        mixer.scan = chosen.scan
    return chosen.name, timed


def quickest(times: dict[RecurrenceBackend, float]) -> RecurrenceBackend:
    """The quickest; among equally quick ones that of the highest rank."""
    log.info(
        "recurrences by the clock, in us a layer for two prompts of 4,096 rows: %s",
        ", ".join(f"{b.name} {1e6 * seconds:.0f}" for b, seconds in times.items()),
    )
    return max((b for b in times if times[b] <= CLOSE * min(times.values())), key=lambda b: b.rank)


@torch.inference_mode()
def time_all(
    able: list[RecurrenceBackend], mixers: list[Any], site: RecurrenceSite, codec: Codec
) -> dict[RecurrenceBackend, float]:
    """Seconds of a layer of each kind. A backend that fails is left out, and the log says why."""
    times = dict.fromkeys(able, torch.inf)
    with compiling():
        for backend in (1 + ROUNDS) * able:
            if backend in times:
                try:
                    seconds = sum(_seconds(backend, mixer, site, codec) for mixer in mixers)
                except Exception as e:  # nobody asked for this package, or the device is full
                    del times[backend]
                    log.warning(
                        "recurrence backend '%s' is left out: it failed when it was timed (%s: %s)",
                        backend.name,
                        type(e).__name__,
                        e,
                    )
                else:
                    times[backend] = min(times[backend], seconds)
    if site.device == "cuda":
        torch.cuda.empty_cache()  # the memory that is left is measured next, for the pool
    return times


def _seconds(backend: RecurrenceBackend, mixer: Any, site: RecurrenceSite, codec: Codec) -> float:
    """Seconds of the step in one layer. The first run of a backend compiles; the least of all runs counts."""
    group = CacheGroup("scratch", (0,), kind="state", states=(mixer.spec.state(),))
    cache = KVPool([group], codec, [2 * len(PROMPTS)], 16, site.device, site.dtype).layer(0)
    table = torch.arange(2 * len(PROMPTS), dtype=torch.int32, device=site.device).view(-1, 2)
    batch, width = batch_of(PROMPTS, (table,)), cache.planes["ahead"].shape[-1]
    rows_TX = torch.zeros(len(batch.input_ids), width, dtype=site.dtype, device=site.device)
    before, mixer.scan = mixer.scan, backend.scan
    try:
        if site.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        mixer.run(rows_TX, cache, batch)
        if site.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun
    finally:
        mixer.scan = before
