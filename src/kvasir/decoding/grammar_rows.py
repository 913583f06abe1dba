"""Rows in which a grammar meets the request's other constraints. The grammar wins, or the row fails by name: no draw is
ever outside of the grammar.

- An output that is finished ends, whatever else forbids its end.
- ``min_tokens`` holds back stop tokens, then the end, while anything else may be drawn.
- A processor that would exchange a token for one that the grammar forbids leaves it.
- Where bans, allowed tokens and processors leave nothing of what the grammar allows, the request fails
  (``no_token_allowed``, see ``constraints``). A bias is finite and forbids nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvasir.types import Request


class Conditions(Protocol):
    """The conditions of a step's rows, each with its row first, as ``rows.Packer`` collects them."""

    vocab_size: int
    banned: list[tuple[int, int]]
    held: list[tuple[int, int]]
    steered: list[tuple]
    replaced: list[tuple[int, int, int]]
    forced: list[tuple[int, int]]
    masks: list[tuple[int, np.ndarray]]
    pushed: dict[int, tuple[int, str]]
    errors: dict[int, str]


class Restrictions(Protocol):
    """The request's own word on its tokens, as ``rows.SeatState`` has it."""

    restricted: bool
    matcher: Any
    allowed: np.ndarray | None
    ends: list[int]


def bitset(ids: tuple[int, ...] | list[int], vocab_size: int) -> np.ndarray:
    """A mask of the given tokens, int32 [ceil(V / 32)]."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def holds(bits: np.ndarray, token: int) -> bool:
    """Whether a mask allows ``token``."""
    return bool(bits[token // 32] >> (token % 32) & 1)


def add_mask(packer: Conditions, m: int, bits: np.ndarray, state: Restrictions) -> None:
    """Add the grammar's mask of row ``m``, after everything else that the request says about the row."""
    if state.restricted:
        eos = bitset(state.matcher.eos_ids, packer.vocab_size)
        if not (bits & ~eos).any():
            _end(packer, m)
        else:
            token, name = packer.pushed.get(m, (-1, ""))
            if token >= 0 and not holds(bits, token):
                packer.errors[m] = (
                    f"grammar_error: the grammar forbids token {token}, which the processor '{name}' forces"
                )
                return
            packer.replaced = [
                (row, i, other) for row, i, other in packer.replaced if row != m or other < 0 or holds(bits, other)
            ]
            if state.allowed is not None:
                bits = bits & state.allowed
            if any(row == m for row, _ in packer.held):
                _hold_less(packer, m, bits, eos, bitset(state.ends, packer.vocab_size))
    packer.masks.append((m, bits))


def _hold_less(packer: Conditions, m: int, bits: np.ndarray, eos: np.ndarray, ends: np.ndarray) -> None:
    """Give way with ``min_tokens`` where nothing else is left of ``bits``: a stop token before the end."""
    gone = [i for row, i in packer.banned if row == m] + [i for row, i, other in packer.replaced if row == m]
    left = bits & ~bitset(gone, packer.vocab_size)
    if not (left & ~ends).any():
        stop = (left & ~eos).any()
        packer.held = [(row, i) for row, i in packer.held if row != m or (stop and holds(eos, i))]


def _end(packer: Conditions, m: int) -> None:
    """Drop all conditions of a row that can only end."""
    packer.banned = [entry for entry in packer.banned if entry[0] != m]
    packer.held = [entry for entry in packer.held if entry[0] != m]
    packer.steered = [entry for entry in packer.steered if entry[0] != m]
    packer.replaced = [entry for entry in packer.replaced if entry[0] != m]
    packer.forced = [entry for entry in packer.forced if entry[0] != m]


def constraints(request: Request) -> list[str]:
    """The parameters of a request that can rule out tokens, by the names of SamplingParams."""
    params = request.params
    found = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words),
        "min_tokens": params.min_tokens > 0,
        "processors": bool(request.processors),
        "grammar": params.grammar is not None,
    }
    return [name for name, there in found.items() if there]
