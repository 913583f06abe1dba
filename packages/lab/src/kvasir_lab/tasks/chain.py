"""Chains of +, - and * modulo a number, worked out line by line, ending in ``Answer: N``.

    Compute modulo 97: start 12; +45; *3; -7      ->      12+45=57 / 57*3=74 / 74-7=67 / Answer: 67

Shape suffixes: N problems, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir_lab.arithmetic import LONGER, SIGNS, Chains, check_dial, draw_chains, put_chain, slipped
from kvasir_lab.sheet import Sheet, SheetTask
from kvasir_lab.task import Split


@dataclass(frozen=True)
class Config:
    """The dial: more steps, a larger modulus and larger factors (2..max_factor) are harder."""

    modulus: int = 97
    min_steps: int = 4
    max_steps: int = 16
    max_factor: int = 12

    def __post_init__(self) -> None:
        check_dial("chain", self.modulus, self.min_steps, self.max_steps, self.max_factor)


class Chain(SheetTask):
    """Modular arithmetic with a written scratchpad; the checker knows every step exactly."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Chains:
        c = self.config
        steps = (c.max_steps + 1, c.max_steps + LONGER) if split == "longer" else (c.min_steps, c.max_steps)
        return draw_chains(rng, count, steps, c.modulus, c.max_factor)

    def key(self, drawn: Chains) -> np.ndarray:
        """Hash [N] of the chain's numbers (multiply and mix, as in splitmix64).

        Never change it: trained models have seen the training split that it defines.
        """
        h = drawn.start.astype(np.uint64) + np.uint64(self.config.modulus << 32)
        for k in range(drawn.signs.shape[1]):
            item = (drawn.operands[:, k] * 4 + drawn.signs[:, k] + 8).astype(np.uint64)
            h = (h ^ item) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
        return h

    def ask(self, sheet: Sheet, drawn: Chains) -> None:
        sheet.put(f"Compute modulo {self.config.modulus}: start ")
        put_chain(sheet, drawn)

    def solve(self, sheet: Sheet, drawn: Chains, rng: np.random.Generator, wrong: np.ndarray) -> None:
        values, _ = slipped(drawn, rng, wrong)
        value = drawn.start
        for k in range(drawn.signs.shape[1]):
            used = drawn.signs[:, k] >= 0
            sheet.put_number(value, used)
            sheet.put_choice(SIGNS, drawn.signs[:, k])
            sheet.put_number(drawn.operands[:, k])
            sheet.put("=", used)
            sheet.put_number(values[:, k])
            sheet.put("\n", used)
            value = np.where(used, values[:, k], value)
        sheet.put("Answer: ")
        sheet.put_number(value)
