"""Chains modulo a number with slips and re-checks: ``Wait`` repairs a slip (useful) or repeats a right step (needless).

    12+45=59 // Wait, 12+45=57 // 57*3=74 // Wait, 57*3=74 // Answer: 74          (// is an empty line)

A step slips at rate ``slip``. A slip is repaired at once at rate ``repair``. A right step is re-checked at rate
``needless``. `Reflect.steps` labels every step of any reply. The slips carry loss, so a model sampled at temperature 1
shows these rates.

Shape suffixes: N problems, K steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.arithmetic import LONGER, SIGNS, Chains, apply, check_dial, draw_chains, put_chain, slipped
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split

LINE = re.compile(r"(Wait, )?(\d{1,6})([+*-])(\d{1,6})=(\d{1,6})")


@dataclass(frozen=True)
class Config:
    modulus: int = 97
    min_steps: int = 4
    max_steps: int = 10
    max_factor: int = 12
    slip: float = 0.12
    repair: float = 0.85
    needless: float = 0.12

    def __post_init__(self) -> None:
        check_dial("reflect", self.modulus, self.min_steps, self.max_steps, self.max_factor)
        for name in ("slip", "repair", "needless"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"reflect: {name}={getattr(self, name)} must lie in 0..1")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reply.

    A ``useful`` step re-checks a slip, a ``needless`` one re-checks a right step. ``right``: its arithmetic holds.
    """

    text: str
    kind: Literal["linear", "useful", "needless"]
    right: bool


class Reflect(SheetTask):
    """Arithmetic that slips, waits and repairs, with every step labelled."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Drawn:
        c = self.config
        steps = (c.max_steps + 1, c.max_steps + LONGER) if split == "longer" else (c.min_steps, c.max_steps)
        return draw_chains(rng, count, steps, c.modulus, c.max_factor)

    def ask(self, sheet: Sheet, drawn: Chains) -> None:
        sheet.put(f"Compute modulo {self.config.modulus} and check yourself: start ")
        put_chain(sheet, drawn)

    def left_wrong(self, rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
        kept = self.config.slip * (1 - self.config.repair)
        return rng.random(len(drawn)) < 1 - (1 - kept) ** drawn.difficulty

    def solve(self, sheet: Sheet, drawn: Chains, rng: np.random.Generator, wrong: np.ndarray) -> None:
        c, (count, wide) = self.config, drawn.signs.shape
        values, left = slipped(drawn, rng, wrong)
        repaired = rng.random((count, wide)) < c.slip * c.repair
        again = rng.random((count, wide)) < c.needless
        by = rng.integers(1, 4, (count, wide)) * np.where(rng.random((count, wide)) < 0.5, 1, -1)
        value = drawn.start
        for k in range(wide):
            sign, operand, after = drawn.signs[:, k], drawn.operands[:, k], values[:, k]
            used = sign >= 0
            slip = used & repaired[:, k] & (left != k)
            self._step(sheet, (value, sign, operand, np.where(slip, (after + by[:, k]) % c.modulus, after)), used)
            wait = used & (left != k) & (slip | again[:, k])
            sheet.put("Wait, ", wait)
            self._step(sheet, (value, sign, operand, after), wait)
            value = np.where(used, after, value)
        sheet.put("Answer: ")
        sheet.put_number(value)

    @staticmethod
    def _step(sheet: Sheet, parts: tuple[np.ndarray, ...], where: np.ndarray) -> None:
        value, sign, operand, after = parts
        sheet.put_number(value, where)
        sheet.put_choice(SIGNS, sign, where)
        sheet.put_number(operand, where)
        sheet.put("=", where)
        sheet.put_number(after, where)
        sheet.put("\n\n", where)

    def work_out(self, problem: Problem) -> list[str]:
        """The chain without slips or re-checks."""
        modulus, start = map(int, re.findall(r"modulo (\d+) .*start (\d+)", problem.messages[-1]["content"])[0])
        value, lines = start, []
        for sign, operand in re.findall(r"; ([+*-])(\d+)", problem.messages[-1]["content"]):
            after = {"+": value + int(operand), "-": value - int(operand), "*": value * int(operand)}[sign] % modulus
            lines.append(f"{value}{sign}{operand}={after}")
            value = after
        return [*lines, f"Answer: {value}"]

    def tally(self, problem: Problem, reply: str) -> dict[str, int]:
        """Count the steps that slipped at first, those that did not, and the re-checks of each kind."""
        steps = self.steps(problem, reply)
        linear = [step for step in steps if step.kind == "linear"]
        return {
            "slips": sum(not step.right for step in linear),
            "right steps": sum(step.right for step in linear),
            "useful": sum(step.kind == "useful" for step in steps),
            "needless": sum(step.kind == "needless" for step in steps),
        }

    def notes(self, problem: Problem) -> list[str]:
        return [f"{step.kind}{'' if step.right else ' (slip)'}" for step in self.steps(problem, problem.solution)]

    def steps(self, problem: Problem, reply: str) -> list[Step]:
        """The labelled steps of any reply, judged by arithmetic alone.

        Paragraphs that are no step count as linear and not right.
        """
        out: list[Step] = []
        for text in reply.strip().split("\n\n"):
            if text.startswith("Answer:"):
                continue
            found = LINE.fullmatch(text.strip())
            right = False
            if found:
                wait, *numbers = found.groups()
                left, operand, after = (int(numbers[i]) for i in (0, 2, 3))
                right = after == int(
                    apply(np.array(left), np.array(SIGNS.index(numbers[1])), np.array(operand), self.config.modulus)
                )
            if not text.startswith("Wait"):
                kind = "linear"
            else:
                kind = "needless" if out and out[-1].right else "useful"
            out.append(Step(text, kind, right))
        return out
