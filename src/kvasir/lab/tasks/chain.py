"""Chains of +, - and * modulo a number, worked out line by line, ending in ``Answer: N``.

    Compute modulo 97: start 12; +45; *3; -7      ->      12+45=57 / 57*3=74 / 74-7=67 / Answer: 67

The training documents are written as token ids by numpy (millions a second), so that a GPU never waits for them; a test
holds them equal to the tokenised text.

Shape suffixes: N problems, K steps, C columns of the id grid (-1 = empty).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError
from kvasir.lab.task import HELD_OUT, Documents, Problem, Split, Task, generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIGNS = "+-*"
SYSTEMS = ("", "", "", "You are a helpful assistant.", "You are a careful mathematician. Work step by step.")
LONGER = 8  # the split ``longer`` has up to this many steps more than the longest in training


@dataclass(frozen=True)
class Config:
    """The dial: more steps, a larger modulus and larger factors (2..max_factor) are harder."""

    modulus: int = 97
    min_steps: int = 4
    max_steps: int = 16
    max_factor: int = 12

    def __post_init__(self) -> None:
        if not 5 <= self.modulus <= 999:
            raise ConfigError(f"chain: modulus={self.modulus} must lie in 5..999")
        if not 1 <= self.min_steps <= self.max_steps <= 64:
            raise ConfigError(f"chain: min_steps={self.min_steps} and max_steps={self.max_steps} must satisfy 1 <= min <= max <= 64")
        if not 2 <= self.max_factor < self.modulus:
            raise ConfigError(f"chain: max_factor={self.max_factor} must lie in 2..{self.modulus - 1}")


@dataclass(slots=True)
class Chains:
    """N drawn problems: start [N]; signs, operands [N, K] with -1 beyond the last step; values [N, K] after each step."""

    start: np.ndarray
    signs: np.ndarray
    operands: np.ndarray
    values: np.ndarray

    def take(self, index: np.ndarray) -> Chains:
        return Chains(self.start[index], self.signs[index], self.operands[index], self.values[index])


class Chain(Task):
    """Modular arithmetic with a written scratchpad and an exact oracle for every step."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())

    # ------------------------------------------------------------------------------------------------------- drawing

    def _draw(self, rng: np.random.Generator, count: int, split: Split) -> Chains:
        c = self.config
        low, high = (c.max_steps + 1, c.max_steps + LONGER) if split == "longer" else (c.min_steps, c.max_steps)
        steps = rng.integers(low, high + 1, count)
        start = rng.integers(0, c.modulus, count)
        signs = rng.integers(0, 3, (count, high))
        terms, factors = rng.integers(1, c.modulus, (count, high)), rng.integers(2, c.max_factor + 1, (count, high))
        operands = np.where(signs == 2, factors, terms)
        value, values = start, np.empty((count, high), dtype=np.int64)
        for k in range(high):
            choices = np.stack([value + operands[:, k], value - operands[:, k], value * operands[:, k]])
            value = values[:, k] = np.take_along_axis(choices, signs[None, :, k], 0)[0] % c.modulus
        beyond = np.arange(high) >= steps[:, None]
        for grid in (signs, operands, values):
            grid[beyond] = -1
        return Chains(start, signs, operands, values)

    def _in_split(self, chains: Chains, split: Split) -> np.ndarray:
        """[N] bool: the split of a chain, from a 64-bit hash of its numbers (multiply and mix, as in splitmix64)."""
        if split == "longer":
            return np.ones(len(chains.start), dtype=bool)
        h = chains.start.astype(np.uint64) + np.uint64(self.config.modulus << 32)
        for k in range(chains.signs.shape[1]):
            item = (chains.operands[:, k] * 4 + chains.signs[:, k] + 8).astype(np.uint64)
            h = (h ^ item) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
        bucket = h % np.uint64(HELD_OUT)
        return {"test": bucket == 0, "validation": bucket == 1, "train": bucket > 1}[split]

    def _chains(self, rng: np.random.Generator, split: Split, count: int) -> Chains:
        parts: list[Chains] = []
        found, share = 0, 1 if split in ("train", "longer") else HELD_OUT
        for _ in range(100):
            if found >= count:
                break
            drawn = self._draw(rng, int((count - found) * share * 1.1) + 16, split)
            parts.append(drawn.take(np.flatnonzero(self._in_split(drawn, split))))
            found += len(parts[-1].start)
        if found < count:
            raise ConfigError(f"chain finds only {found} of {count} problems for '{split}': its dial leaves too few; "
                              "take more steps or a larger modulus")
        return Chains(*(np.concatenate([getattr(p, f) for p in parts])[:count] for f in Chains.__slots__))

    # ------------------------------------------------------------------------------------------------------ problems

    def problems(self, split: Split, seed: int, count: int) -> list[Problem]:
        chains = self._chains(generator(split, seed), split, count)
        return [self._problem(chains, n) for n in range(count)]

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        return self._problem(self._chains(rng, split, 1), 0)

    def _problem(self, chains: Chains, n: int, system: str = "") -> Problem:
        steps = int((chains.signs[n] >= 0).sum())
        question = f"Compute modulo {self.config.modulus}: start {chains.start[n]}"
        value, lines = chains.start[n], []
        for k in range(steps):
            step = f"{SIGNS[chains.signs[n, k]]}{chains.operands[n, k]}"
            question += f"; {step}"
            lines.append(f"{value}{step}={chains.values[n, k]}\n")
            value = chains.values[n, k]
        messages = ({"role": "user", "content": question},)
        if system:
            messages = ({"role": "system", "content": system}, *messages)
        return Problem(messages, "".join(lines) + f"Answer: {value}", str(value), steps)

    def check(self, problem: Problem, reply: str) -> bool:
        """The last line must be ``Answer: N`` with the right N, and the only such line."""
        lines = reply.strip().split("\n")
        answers = [line for line in lines if line.startswith("Answer:")]
        return len(answers) == 1 and lines[-1] == f"Answer: {problem.answer}"

    def wrong_step(self, problem: Problem, reply: str) -> int | None:
        """The first line of the scratchpad that differs from the oracle's, or None when every line is right."""
        wanted, got = problem.solution.split("\n"), reply.strip().split("\n")
        for i, line in enumerate(wanted):
            if i >= len(got) or got[i] != line:
                return i
        return None if len(got) == len(wanted) else len(wanted)

    # ----------------------------------------------------------------------------------------------------- documents

    def documents(self, tokenizer: Tokenizer, rng: np.random.Generator, count: int, split: Split = "train") -> Documents:
        parts, left = [], count
        for i, system in enumerate(SYSTEMS):
            share = left // (len(SYSTEMS) - i)
            left -= share
            if share:
                parts.append(self._documents(tokenizer, self._chains(rng, split, share), system))
        return Documents.join(parts)

    def _documents(self, tokenizer: Tokenizer, chains: Chains, system: str) -> Documents:
        """Fill an id grid [N, C] column block by column block, then drop the empty cells."""
        head, tail = self._problem(chains, 0, system).prompt.split("Compute modulo ")[0], "<|im_end|>\n<|im_start|>assistant\n"
        count, wide = len(chains.start), len(str(self.config.modulus))
        digit = np.array([tokenizer.token_to_id(str(d)) for d in range(10)] + [-1], dtype=np.int32)
        columns: list[np.ndarray] = []

        def put(text: str, where: np.ndarray | None = None) -> None:
            ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
            block = np.broadcast_to(ids, (count, len(ids)))
            columns.append(block if where is None else np.where(where[:, None], block, -1))

        def put_number(value: np.ndarray) -> None:
            power = 10 ** np.arange(wide - 1, -1, -1)
            place = value[:, None] // power
            columns.append(digit[np.where((place > 0) | ((power == 1) & (value >= 0)[:, None]), place % 10, 10)])

        signs = {before: self._sign_ids(tokenizer, before) for before in ("; ", "")}
        put(f"{head}Compute modulo {self.config.modulus}: start ")
        put_number(chains.start)
        for k in range(chains.signs.shape[1]):
            columns.append(signs["; "][chains.signs[:, k]])
            put_number(chains.operands[:, k])
        put(tail)
        prompt_width = sum(block.shape[1] for block in columns)
        value = chains.start
        for k in range(chains.signs.shape[1]):
            used = chains.signs[:, k] >= 0
            put_number(np.where(used, value, -1))
            columns.append(signs[""][chains.signs[:, k]])
            put_number(chains.operands[:, k])
            put("=", used)
            put_number(chains.values[:, k])
            put("\n", used)
            value = np.where(used, chains.values[:, k], value)
        put("Answer: ")
        put_number(value)
        put("<|im_end|>")
        grid = np.concatenate(columns, axis=1)
        full = grid >= 0
        trained = np.broadcast_to(np.arange(grid.shape[1]) >= prompt_width, grid.shape)
        return Documents(grid[full], trained[full], np.concatenate([[0], np.cumsum(full.sum(1))]))

    @staticmethod
    def _sign_ids(tokenizer: Tokenizer, before: str) -> np.ndarray:
        """[4, C]: the ids of ``before`` + sign, padded with -1; the last row, reached by sign -1, is empty."""
        coded = [tokenizer.encode(before + sign, add_special_tokens=False).ids for sign in SIGNS] + [[]]
        wide = max(map(len, coded))
        return np.array([ids + [-1] * (wide - len(ids)) for ids in coded], dtype=np.int32)
