"""Reach a target with given numbers and + - * /, using each number at most once.

    Make 22 from 7, 4, 3, 9.      ->      7*4=28 / 9-3=6 / 28-6=22 / Answer: 22

The equations are replayed exactly. A single expression is right as well: ``Answer: 7*4-(9-3)``.

Shape suffixes: N problems, M numbers, R equations (M - 1).
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask, fold
from kvasir_lab.task import Problem, Split

SIGNS = ("+", "-", "*", "/")
LARGEST = 999  # Largest result of any equation.
EQUATION = re.compile(r"(\d{1,6})([+*/-])(\d{1,6})=(\d{1,6})")


@dataclass(frozen=True)
class Config:
    """The dial: more numbers are much harder; ``longer`` has one more than the most in training."""

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 20
    max_target: int = 99

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers <= 6:
            raise ConfigError(
                f"countdown: min_numbers={self.min_numbers} and max_numbers={self.max_numbers} "
                "must satisfy 2 <= min <= max <= 6"
            )
        if not 5 <= self.max_number <= 100:
            raise ConfigError(f"countdown: max_number={self.max_number} must lie in 5..100")
        if not 10 <= self.max_target <= LARGEST:
            raise ConfigError(f"countdown: max_target={self.max_target} must lie in 10..{LARGEST}")


@dataclass(slots=True)
class Games(Drawn):
    """numbers [N, M], -1 where there are fewer; target [N]; left, sign, right, result [N, R], sign -1 past the last."""

    numbers: np.ndarray
    target: np.ndarray
    left: np.ndarray
    sign: np.ndarray
    right: np.ndarray
    result: np.ndarray


def outcomes(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Results [N, 4] of a op b (a >= b >= 1), and which are allowed: whole, positive, not too large, not trivial."""
    quotient = a // b
    values = np.stack([a + b, a - b, a * b, quotient], 1)
    allowed = np.stack(
        [np.ones(len(a), dtype=bool), a > b, (b > 1) & (a * b <= LARGEST), (b > 1) & (quotient * b == a)], 1
    )
    return values, allowed


def played(
    rng: np.random.Generator, numbers: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random equations that use up ``size`` [N] of the ``numbers`` [N, M]: left, sign, right, result [N, R]."""
    now, rows, steps = numbers.copy(), np.arange(len(numbers)), []
    for r in range(numbers.shape[1] - 1):
        going = r < size - 1
        i, j = np.argsort(np.where(now >= 0, rng.random(now.shape), 2.0), axis=1)[:, :2].T
        a, b = np.maximum(now[rows, i], now[rows, j]), np.maximum(np.minimum(now[rows, i], now[rows, j]), 1)
        values, allowed = outcomes(a, b)
        sign = np.where(going, np.argmax(np.where(allowed, rng.random((len(numbers), 4)), -1.0), axis=1), -1)
        result = np.where(going, values[rows, sign], -1)
        now[rows, i] = np.where(going, result, now[rows, i])
        now[rows, j] = np.where(going, -1, now[rows, j])
        steps.append((a, sign, b, result))
    left, sign, right, result = (np.stack(part, 1) for part in zip(*steps, strict=True))
    return left, sign, right, result


class Countdown(SheetTask):
    """Search for an expression that reaches a number. Many are right, so votes need the checker."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Games:
        c = self.config
        most = c.max_numbers + (split == "longer")
        size = np.full(count, most) if split == "longer" else rng.integers(c.min_numbers, most + 1, count)
        numbers = np.where(np.arange(most) < size[:, None], rng.integers(1, c.max_number + 1, (count, most)), -1)
        left, sign, right, result = played(rng, numbers, size)
        target = result[np.arange(count), size - 2]
        fair = (target >= 1) & (target <= c.max_target) & (numbers != target[:, None]).all(1)
        return Games(size, numbers, target, left, sign, right, result).take(np.flatnonzero(fair))

    def key(self, drawn: Games) -> np.ndarray:
        """Hash [N] of the sorted numbers: the same game in another order is the same problem."""
        numbers = np.full((len(drawn), 8), -1)
        numbers[:, : drawn.numbers.shape[1]] = -np.sort(-drawn.numbers, axis=1)
        numbers[:, -1] = drawn.target
        return fold(numbers)

    def ask(self, sheet: Sheet, drawn: Games) -> None:
        sheet.put("Make ")
        sheet.put_number(drawn.target)
        sheet.put(" from")
        for m in range(drawn.numbers.shape[1]):
            sheet.put(", " if m else " ", drawn.numbers[:, m] >= 0)
            sheet.put_number(drawn.numbers[:, m])
        sheet.put(".")

    def solve(self, sheet: Sheet, drawn: Games, rng: np.random.Generator, wrong: np.ndarray) -> None:
        if wrong.any():
            drawn = self._strayed(drawn, rng, wrong)
        signs, results, answer = self._slipped(drawn, rng, wrong)
        for r in range(drawn.sign.shape[1]):
            used = drawn.sign[:, r] >= 0
            sheet.put_number(drawn.left[:, r], used)
            sheet.put_choice(SIGNS, signs[:, r])
            sheet.put_number(drawn.right[:, r], used)
            sheet.put("=", used)
            sheet.put_number(results[:, r], used)
            sheet.put("\n", used)
        sheet.put("Answer: ")
        sheet.put_number(answer)

    @staticmethod
    def _strayed(drawn: Games, rng: np.random.Generator, wrong: np.ndarray) -> Games:
        """Replace most solutions where ``wrong`` by another way that misses the target.

        A solution that is wrong at the end only would give the right way away.
        """
        left, sign, right, result = played(rng, drawn.numbers, drawn.difficulty)
        rows, last = np.arange(len(drawn)), drawn.difficulty - 2
        a, b = left[rows, last], right[rows, last]
        # The way reaches the target as it is, or with the sign that a slip takes.
        reaches = (np.stack([a + b, a - b, result[rows, last]]) == drawn.target).any(0)
        stray = (wrong & ~reaches & (rng.random(len(drawn)) < 0.9))[:, None]
        return dataclasses.replace(
            drawn,
            left=np.where(stray, left, drawn.left),
            sign=np.where(stray, sign, drawn.sign),
            right=np.where(stray, right, drawn.right),
            result=np.where(stray, result, drawn.result),
        )

    @staticmethod
    def _slipped(
        drawn: Games, rng: np.random.Generator, wrong: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Change the last sign where ``wrong``: its result misses the target, or is claimed to be the target."""
        rows, last = np.arange(len(drawn)), drawn.difficulty - 2
        sign, a, b = drawn.sign[rows, last], drawn.left[rows, last], drawn.right[rows, last]
        other = np.where((sign == 1) | (sign == 3), 0, 1)  # + for - and /, otherwise -: never the same value
        value = np.where(other == 0, a + b, a - b)
        claimed = rng.random(len(drawn)) < 0.5
        signs, results = drawn.sign.copy(), drawn.result.copy()
        signs[rows, last] = np.where(wrong, other, sign)
        results[rows, last] = np.where(wrong & ~claimed, value, drawn.target)
        return signs, results, results[rows, last]

    def check(self, problem: Problem, reply: str) -> bool:
        target, *numbers = map(int, re.findall(r"\d+", problem.messages[-1]["content"]))
        *equations, last = reply.strip().split("\n")
        if not last.startswith("Answer: "):
            return False
        left, body = Counter(numbers), last.removeprefix("Answer: ").strip()
        return self._replay(equations, body, left, target) if equations else self._express(body, left, target)

    def work_out(self, problem: Problem) -> list[str]:
        """No lines: a way of one's own says little about another one."""
        return []

    def account(self, problem: Problem, candidate: str) -> str:
        """The candidate's equations worked out again, with the numbers left, up to the first that fails.

        A: 7*4=28, 3 9 28; 9-3=6, 28 6; 28-6=22, 22; 22 of 22 good
        """
        target, *left = map(int, re.findall(r"\d+", problem.messages[-1]["content"]))
        out, result = [], None
        for line in candidate.strip().split("\n")[:-1]:
            found = EQUATION.fullmatch(line)
            if not found:
                return "; ".join([*out, "none"])
            a, b, claimed = (int(found[i]) for i in (1, 3, 4))
            missing = a not in left or b not in left or (a == b and left.count(a) < 2)
            result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b and a % b == 0 else -1}[found[2]]
            if missing or result < 0 or result != claimed:
                worked = f"{a}{found[2]}{b}" + (f"={result}" if not missing and result >= 0 else "")
                return "; ".join([*out, worked])
            left.remove(a)
            left.remove(b)
            left.append(result)
            out.append(f"{line}, {' '.join(map(str, left))}")
        return "; ".join([*out, f"{result} of {target}"] if out else [])

    @staticmethod
    def _replay(equations: list[str], body: str, left: Counter[int], target: int) -> bool:
        result = None
        for line in equations:
            found = EQUATION.fullmatch(line)
            if not found:
                return False
            a, b, result = (int(found[i]) for i in (1, 3, 4))
            left.subtract((a, b))
            if min(left[a], left[b]) < 0 or not _holds(a, found[2], b, result):
                return False
            left[result] += 1
        return result == target and body == str(target)

    @staticmethod
    def _express(body: str, left: Counter[int], target: int) -> bool:
        try:
            tree = ast.parse(body[:200].strip(), mode="eval").body
            value = _value(tree, left)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        return isinstance(tree, ast.BinOp) and value == target and min(left.values()) >= 0

    def answer(self, reply: str) -> str | None:
        """The equations or the expression itself. Their value says nothing, because all replies claim the target."""
        lines = [line.strip() for line in reply.strip().split("\n")]
        if not lines[-1].startswith("Answer: "):
            return None
        return ";".join(sorted(lines[:-1])) or lines[-1].removeprefix("Answer: ") or None


def _holds(a: int, sign: str, b: int, result: int) -> bool:
    return {"+": a + b, "-": a - b, "*": a * b}.get(sign) == result if sign != "/" else b != 0 and result * b == a


def _value(node: ast.expr, left: Counter[int]) -> Fraction:
    """The exact value of a parsed expression; the numbers used are taken out of ``left``.

    Raises ValueError for anything else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        left[node.value] -= 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left, left), _value(node.right, left)
        for kind, apply in (
            (ast.Add, Fraction.__add__),
            (ast.Sub, Fraction.__sub__),
            (ast.Mult, Fraction.__mul__),
            (ast.Div, Fraction.__truediv__),
        ):
            if isinstance(node.op, kind):
                return apply(a, b)
    raise ValueError("not an expression of + - * / and numbers")
