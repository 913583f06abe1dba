"""A tape: the torch calls of one computation, recorded once and replayed on the same memory. It is to a CPU what a CUDA
graph is to a GPU.

A small model's step on a CPU is a few hundred torch calls whose work is done in a microsecond. Two thirds of them only
make views, and the others also allocate what they return. A replay makes no view and no tensor: each remaining call
writes to the memory it wrote to when it was recorded. So whatever differs from step to step must lie in tensors that
the caller fills before a replay, and no shape may depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Calls that copy their first argument, recorded as ``copy_``.
COPIES = frozenset(
    (
        "aten::clone",
        "aten::contiguous",
        "aten::to",
        "aten::_to_copy",
        "aten::reshape",
        "aten::flatten",
        "aten::lift_fresh",
    )
)
# Public calls for those whose names are not found in ``torch``.
NAMES = {
    "linalg_vector_norm": torch.linalg.vector_norm,
    "silu": torch._C._nn.silu,
    "gelu": torch._C._nn.gelu,
    "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
}


class Arena:
    """Memory for what tapes compute. Tapes that never run at the same time share an arena."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []  # bytes

    def __len__(self) -> int:
        return sum(map(len, self.blocks))


class _Use:
    """Whether anything reads a result. The list of calls holds this object and not the result's memory."""

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read = False


class _Lease:
    """One result's memory, which returns to ``free`` when the last tensor that shares it is gone."""

    __slots__ = ("block", "free", "use")

    def __init__(self, block: torch.Tensor, free: list[torch.Tensor]) -> None:
        self.block = block
        self.free = free
        self.use = _Use()

    def __del__(self) -> None:
        self.free.append(self.block)


class Tape:
    """Recorded calls, which ``replay`` repeats. ``result`` is what the recorded function returned."""

    def __init__(self, calls: list[tuple[Callable, tuple, dict]], result: Any) -> None:
        self._calls = calls
        self.result = result

    def __len__(self) -> int:
        return len(self._calls)

    @torch.inference_mode()
    def replay(self) -> Any:
        for call, args, named in self._calls:
            call(*args, **named)
        return self.result


@torch.inference_mode()
def record(function: Callable[[], Any], arena: Arena) -> Tape:
    """Run ``function`` once and record it. The results lie in the arena, so they must be read before another tape that
    shares it runs."""
    recorder = _Recorder(arena)
    with recorder:
        result = function()
    for tensor in _tensors(result):
        if _lease(tensor):
            _lease(tensor).use.read = True
    return Tape([call for use, call in recorder.calls if use is None or use.read], result)


class _Recorder(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.free = list(arena.blocks)
        self.calls: list[tuple[_Use | None, tuple[Callable, tuple, dict]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = kwargs or {}
        found = func(*args, **named)
        leases = {id(lease): lease for x in _tensors((args, named)) if (lease := _lease(x))}.values()
        if func._schema.is_mutable:
            self._note(leases, None, _method(func), args, named)
            return found
        inputs = {x.untyped_storage().data_ptr() for x in _tensors((args, named))}
        results = _tensors(found)
        assert results, f"a tape cannot hold {func}: what it returns is read by the host"
        if all(r.untyped_storage().data_ptr() in inputs for r in results):  # views
            assert len(leases) <= 1 or len(inputs) == 1, f"{func}: a view of which of its inputs?"
            for r in results:
                r._lease = next(iter(leases), None)
            return found
        if isinstance(found, torch.Tensor):
            return self._write(leases, func, args, named, found)
        kept = [self._own(r) for r in results]
        for i, target in enumerate(kept):
            self._note(leases, target._lease, _copy_item, (_plain(target), i, func, *args), named)
        return type(found)(kept)

    def _write(self, leases: Any, func: Any, args: tuple, named: dict, found: torch.Tensor) -> torch.Tensor:
        """Record a call that makes one tensor as one that writes to memory of its own."""
        kept = self._own(found)
        target = _plain(kept)
        if func._schema.name in COPIES and args[0].numel() == target.numel():
            source = args[0]
            if source.shape != target.shape:
                target = target.view(source.shape)
            self._note(leases, kept._lease, torch.Tensor.copy_, (target, source), {})
            return kept
        name = func._schema.name.removeprefix("aten::")
        for call in (NAMES.get(name) or getattr(torch, name, None), getattr(func.overloadpacket, "out", None)):
            try:
                call(*args, **named, out=target)
            except (TypeError, RuntimeError):
                continue
            if torch.equal(target, found):
                self._note(leases, kept._lease, call, args, named | {"out": target})
                return kept
        target.copy_(found)
        self._note(leases, kept._lease, _copy_result, (target, NAMES.get(name, func), *args), named)
        return kept

    def _own(self, found: torch.Tensor) -> torch.Tensor:
        """A tensor like ``found``, of the same content, in the arena's memory."""
        size = found.numel() * found.element_size()
        # Among equal blocks, ``min`` takes the one freed last: the CPU's caches still hold it.
        fits = [block for block in reversed(self.free) if size <= len(block) <= 2 * size + 4096]
        block = min(fits, key=len, default=None)
        if block is None:
            block = torch.empty(max(64, size), dtype=torch.uint8, device=found.device)
            self.arena.blocks.append(block)
        else:
            self.free[:] = [b for b in self.free if b is not block]
        dense = found.contiguous()
        kept = block[:size].view(found.dtype).view(dense.shape)
        kept.copy_(dense)
        kept._lease = _Lease(block, self.free)
        return kept

    def _note(self, leases: Any, lease: _Lease | None, call: Callable, args: tuple, named: dict) -> None:
        """Keep a call. ``leases`` are those of what it reads; ``lease`` is that of what it makes."""
        for source in leases:
            source.use.read = True
        args, named = tree_map(_plain, args), tree_map(_plain, named)
        self.calls.append((lease and lease.use, (call, args, named)))


def _copy_result(target: torch.Tensor, call: Callable, *args: Any, **named: Any) -> None:
    target.copy_(call(*args, **named))


def _copy_item(target: torch.Tensor, index: int, call: Callable, *args: Any, **named: Any) -> None:
    target.copy_(call(*args, **named)[index])


def _method(func: Any) -> Callable:
    """The method of Tensor that does what an in-place ``func`` does, in a fraction of the time."""
    name = func._schema.name.removeprefix("aten::")
    return getattr(torch.Tensor, name, func) if func._overloadname != "out" else func


def _lease(x: Any) -> _Lease | None:
    return getattr(x, "_lease", None)


def _plain(x: Any) -> Any:
    """The tensor without its lease, for a call that is kept: memory that a call only names may be used again."""
    return x.view(x.shape) if isinstance(x, torch.Tensor) and _lease(x) else x


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
