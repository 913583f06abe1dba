"""Chains of +, - and * modulo a number as arrays, which the tasks `chain` and `reflect` draw.

Shape suffixes: N problems, K steps (-1 beyond a problem's last step).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet

SIGNS = ("+", "-", "*")
ASKED = tuple(f"; {sign}" for sign in SIGNS)
LONGER = 8  # The split ``longer`` has up to this many steps more than the longest chain in training.


@dataclass(slots=True)
class Chains(Drawn):
    """start [N]; signs, operands [N, K]; values [N, K] after each step; modulus [N]."""

    start: np.ndarray
    signs: np.ndarray
    operands: np.ndarray
    values: np.ndarray
    modulus: np.ndarray

    @property
    def final(self) -> np.ndarray:
        return self.values[np.arange(len(self)), self.difficulty - 1]


def check_dial(name: str, modulus: int, min_steps: int, max_steps: int, max_factor: int) -> None:
    """Raise ConfigError when a dial of the task ``name`` is out of range."""
    if not 5 <= modulus <= 999:
        raise ConfigError(f"{name}: modulus={modulus} must lie in 5..999")
    if not 1 <= min_steps <= max_steps <= 64:
        raise ConfigError(f"{name}: min_steps={min_steps} and max_steps={max_steps} must satisfy 1 <= min <= max <= 64")
    if not 2 <= max_factor < modulus:
        raise ConfigError(f"{name}: max_factor={max_factor} must lie in 2..{modulus - 1}")


def apply(value: np.ndarray, sign: np.ndarray, operand: np.ndarray, modulus: int | np.ndarray) -> np.ndarray:
    """Apply one step to every row; rows with sign -1 keep their value."""
    out = np.where(sign == 0, value + operand, np.where(sign == 1, value - operand, value * operand)) % modulus
    return np.where(sign < 0, value, out)


def draw_chains(rng: np.random.Generator, count: int, steps: tuple[int, int], modulus: int, max_factor: int) -> Chains:
    """Draw ``count`` chains with ``steps`` (least, most) steps."""
    low, high = steps
    length = rng.integers(low, high + 1, count)
    start = rng.integers(0, modulus, count)
    signs = rng.integers(0, 3, (count, high))
    terms, factors = rng.integers(1, modulus, (count, high)), rng.integers(2, max_factor + 1, (count, high))
    operands = np.where(signs == 2, factors, terms)
    beyond = np.arange(high) >= length[:, None]
    signs[beyond] = operands[beyond] = -1
    value, values = start, np.empty((count, high), dtype=np.int64)
    for k in range(high):
        value = values[:, k] = apply(value, signs[:, k], operands[:, k], modulus)
    values[beyond] = -1
    return Chains(length, start, signs, operands, values, np.full(count, modulus))


def put_chain(sheet: Sheet, chains: Chains) -> None:
    """Write the start and the steps as a question names them."""
    sheet.put_number(chains.start)
    for k in range(chains.signs.shape[1]):
        sheet.put_choice(ASKED, chains.signs[:, k])
        sheet.put_number(chains.operands[:, k])


def slipped(chains: Chains, rng: np.random.Generator, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put one slip into every row of ``wrong`` [N] and carry it on to a wrong result.

    Returns values [N, K] and the step of the slip [N] (-1 = none). A slip is off by 1, 2 or 10, as if a carry or the
    modulo had gone wrong.
    """
    count, wide = chains.signs.shape
    at = np.where(wrong, rng.integers(0, 1 << 30, count) % chains.difficulty, -1)
    by = np.array([1, -1, 2, -2, 10, -10])[rng.integers(0, 6, count)]
    by = np.where(by % chains.modulus == 0, 1, by)
    values = _follow(chains, at, by)
    # A later product may hide the slip.
    lost = wrong & (values[np.arange(count), chains.difficulty - 1] == chains.final)
    at = np.where(lost, chains.difficulty - 1, at)
    return _follow(chains, at, by) if lost.any() else values, at


def _follow(chains: Chains, at: np.ndarray, by: np.ndarray) -> np.ndarray:
    value, values = chains.start, np.empty_like(chains.values)
    for k in range(chains.signs.shape[1]):
        value = apply(value, chains.signs[:, k], chains.operands[:, k], chains.modulus)
        value = np.where(at == k, (value + by) % chains.modulus, value)
        values[:, k] = np.where(chains.signs[:, k] < 0, -1, value)
    return values
