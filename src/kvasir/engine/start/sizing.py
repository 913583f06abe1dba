"""Number of pages that fit: the pool's size from what the device has left after a measured worst-case step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.engine.pages.page_pool import pages_for
from kvasir.errors import ConfigError
from kvasir.kv.policy import Stack
from kvasir.logs import log
from kvasir.types import CacheGroup

GIB = 1 << 30
# States of a sequence that computes a prompt: the one that a span reads, and the one that it writes.
STATES = 2
# The most bytes that code and workspaces of one engine take outside torch's allocator, by experience.
OUTSIDE_ALLOCATOR = GIB


def gib(num_bytes: float) -> str:
    """A size for people: in GiB, or in MiB below a tenth of one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def own_bytes(free_before: int, free_now: int, reserved: int) -> tuple[int, int]:
    """Bytes of the GPU that this process took since ``free_before``, and bytes that other processes took. ``reserved``
    is what torch's allocator holds.

    Kernels' code and libraries' workspaces lie outside the allocator. A gap larger than they can be belongs to another
    process, for example an engine that starts at the same time.
    """
    taken = max(reserved, free_before - free_now)
    outside = taken - reserved
    return (taken, 0) if outside <= OUTSIDE_ALLOCATOR else (reserved + OUTSIDE_ALLOCATOR, outside - OUTSIDE_ALLOCATOR)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Pages of each cache group, and what they allow. ``capacity`` is the longest single sequence, in tokens.
    ``state_interval``: tokens from one snapshot of a state to the next. ``states``: what the log says of a group of
    states; "": there is none."""

    num_pages: tuple[int, ...]
    capacity: int
    total_bytes: int
    state_interval: int = 0
    states: str = ""


def token_bytes(groups: Sequence[CacheGroup], codec: str, width: int) -> dict[str, float]:
    """Bytes that one token's keys and values take, by cache group, with this codec (``name:key=value``) and a model of
    ``width`` bytes a number. States take none. Raises ConfigError for a codec that does not fit the heads."""
    import torch

    from kvasir import technique
    from kvasir.kv.codec import CODECS, Codec
    from kvasir.kv.pool import KVPool

    loaded, dtype = technique.load(CODECS, codec, Codec), {2: torch.bfloat16, 4: torch.float32}[width]

    def of_token(group: CacheGroup) -> float:
        return KVPool.page_bytes_of(group, loaded, loaded.page_slots, dtype) / loaded.page_slots

    return {g.name: of_token(g) if g.kind == "pages" else 0.0 for g in groups}


def available_memory() -> int:
    """Bytes of RAM that are free for use, as the kernel estimates it; without its file there is no bound."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def cpu_budget(cpu_cache_bytes: int, taken: float = 0) -> int:
    """Bytes of the KV pool on a CPU: as set, but no more than half of the RAM that is free after ``taken`` bytes."""
    return min(cpu_cache_bytes, max(0, int(available_memory() - taken)) // 2)


def window_pages(window: int, page_slots: int, max_rows: int) -> int:
    """Pages one sequence can hold in a window group: the window, a step's rows, and a page at each ragged end."""
    return pages_for(window + max_rows, page_slots) + 1


def plan_pool(
    groups: Sequence[CacheGroup],
    page_bytes: Sequence[int],
    budget: int,
    *,
    page_slots: int,
    max_rows: int,
    max_num_seqs: int,
    max_model_len: int,
    state_interval: int = 0,
) -> PoolPlan:
    """Divide ``budget`` bytes among the groups.

    Full groups all get the same number of pages; a window group never needs more than its share for ``max_num_seqs``
    sequences at once, so what it leaves goes to the full groups. States get as many bytes as the pages of tokens and
    what these leave, but no more than ``max_num_seqs`` sequences and a snapshot every ``state_interval`` tokens can use
    (0: no snapshots), and no fewer than a sequence needs. Page 0 of each group is the dummy page.
    """
    most_pages = max_num_seqs * pages_for(max_model_len, page_slots)
    token_bytes = sum(b for b, g in zip(page_bytes, groups) if g.kind == "pages")

    def useful_states(full: int) -> int:
        snapshots = max_num_seqs + full * page_slots // state_interval if state_interval else 0
        return max_num_seqs * STATES + snapshots

    def most_at(group: CacheGroup, size: int, full: int) -> int:
        if group.kind == "state":
            return max(STATES, min(useful_states(full), full * token_bytes // size))
        if group.window is None:
            return min(full, most_pages)
        return min(full, most_pages, max_num_seqs * window_pages(group.window, page_slots, max_rows))

    def pages_at(full: int) -> list[int]:
        return [1 + most_at(g, b, full) for g, b in zip(groups, page_bytes)]

    def bytes_at(full: int) -> int:
        return sum(n * b for n, b in zip(pages_at(full), page_bytes))

    low, high = 0, most_pages
    while low < high:  # the largest count that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_at(middle) <= budget else (low, middle - 1)
    pages = pages_at(low)
    for place, (size, group) in enumerate(zip(page_bytes, groups)):
        if group.kind == "state" and (left := budget - bytes_at(low)) > 0:
            pages[place] += max(0, min(left // size, 1 + useful_states(low) - pages[place]))
    tokens = [(n, g) for n, g in zip(pages, groups) if g.kind == "pages"]
    capacity = min(((n - 1) * page_slots for n, g in tokens if g.window is None), default=max_model_len)
    total = sum(n * b for n, b in zip(pages, page_bytes))
    if total > budget:  # not even the states of one sequence fit
        capacity = 0
    for n, g in tokens:  # a window group bounds a sequence only when not even one window fits
        if g.window is not None and n - 1 < min(
            pages_for(max_model_len, page_slots), window_pages(g.window, page_slots, max_rows)
        ):
            capacity = min(capacity, max(0, (n - 1) * page_slots))
    said = "".join(
        f"{n - 1} states, live or snapshots, of {gib(b)}, as {b * page_slots // max(1, token_bytes)} tokens take"
        for n, b, g in zip(pages, page_bytes, groups)
        if g.kind == "state"
    )
    return PoolPlan(tuple(pages), capacity, total, state_interval, said)


def sequences_in(plan: PoolPlan, groups: Sequence[CacheGroup], length: int, *, page_slots: int, max_rows: int) -> int:
    """Number of sequences of ``length`` tokens that the pool holds at once."""

    def needed(group: CacheGroup) -> int:
        if group.kind == "state":
            return 1
        pages = pages_for(length, page_slots)
        return pages if group.window is None else min(pages, window_pages(group.window, page_slots, max_rows))

    return min((n - 1) // needed(g) for n, g in zip(plan.num_pages, groups))


def resolve_length(max_model_len: int, plan: PoolPlan, policy: Stack | None, *, fit: bool, explain: str) -> int:
    """The context length the pool can really hold. Raises ConfigError unless ``fit`` may shorten it, which it says in
    the log. ``policy``: which tokens are forgotten, so that a longer context fits; None: none are."""
    most = max_model_len if policy is None else policy.most(max_model_len, max_model_len)
    if plan.capacity >= most:
        return max_model_len
    holds = f"one sequence of {max_model_len} tokens does not fit the KV pool, which holds {plan.capacity} ({explain})"
    if fit and plan.capacity > 1:
        log.warning(
            "--fit: %s. The context is shortened to %d tokens; for a longer one give the pool more memory "
            "(--gpu-memory-utilization, or --cpu-cache-bytes on a CPU), for a shorter one pass --max-model-len",
            holds,
            plan.capacity,
        )
        return plan.capacity
    if plan.capacity <= 1:
        raise ConfigError(
            f"{holds}. Give the pool more memory (--gpu-memory-utilization, --cpu-cache-bytes on a CPU, or "
            "--num-pages)."
        )
    raise ConfigError(
        f"{holds}. Pass --max-model-len {plan.capacity} or less, give the pool more memory, or pass --fit to choose "
        "for you."
    )
