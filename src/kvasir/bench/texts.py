"""Prompts with structure, for engines that draft: how fast they are, and how many of their drafts are accepted.

``repeated``: a passage of ``PASSAGE`` random tokens, again and again. Attention with random weights soon repeats itself
after it, too; 256 tokens of a hybrid with recurrent layers repeated nothing. ``tasks``: problems of the lab for its
models, which decide where an answer ends. ``edits``: solutions to be repaired or combined; answers copy most of the
prompt.

Decoding is greedy. Drafts should leave the outputs of an engine as they are without drafts, up to near-ties; the share
of equal outputs is measured. Rates are those of decoding: the tokens after the first, over the time beyond that of the
prompts with one token each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvasir.bench.case import PROMPTS
from kvasir.bench.worker import Worker
from kvasir.bench.workloads import Batch
from kvasir.technique import module

# Tokens of the passage that a repeated prompt consists of.
PASSAGE = 48
# Tokens of a piece of text that counts as repeated.
GRAM = 4
# Counts of drafts: tokens drafted, tokens accepted, and drafts verified (one for each sequence and step).
COUNTS = ("drafted", "accepted", "verified")
# Rounds on other prompts that do not count: they warm up kernels and graphs of drafted steps, and the controller.
WARM_ROUNDS = 2
# Outputs of an engine's first arm, by engine, workload and round.
Known = dict[tuple[str, str, int], list[list[int]]]


class Texts:
    """Prompts for one model. ``vocab``: random prompts hold only ids below it."""

    def __init__(self, model: str, vocab: int) -> None:
        self._model, self._vocab = model, vocab

    def prompts(self, kind: str, batch: Batch, number: int) -> tuple[list[list[int]], list[int]]:
        """Prompts of round ``number``, the same for all engines, and the token ids that end an answer."""
        if kind == "repeated":
            rng, found = random.Random(f"{batch.name} {number}"), []
            for _ in range(batch.batch):
                passage = [rng.randrange(self._vocab // 64, self._vocab - self._vocab // 64) for _ in range(PASSAGE)]
                found.append((passage * -(-batch.prompt // PASSAGE))[: batch.prompt])
            return found, []
        problems = module(PROMPTS, "problems")  # `case.parse` has refused the kind if there are none
        return problems.prompts(self._model, kind, batch, number)


def repeated_grams(outputs: Sequence[Sequence[int]]) -> float:
    """The share of the outputs' 4-grams that occurred earlier in the same output."""
    total = fresh = 0
    for output in outputs:
        grams = [tuple(output[i : i + GRAM]) for i in range(len(output) - GRAM + 1)]
        total += len(grams)
        fresh += len(set(grams))
    return 1 - fresh / total if total else 0.0


def life(
    worker: Worker, kind: str, batch: Batch, texts: Texts, count: int, first: int, known: Known, again: bool = False
) -> dict[str, list[Any]]:
    """Metrics of one life of an engine, with a value for each round: the rate, and the counts of drafts.

    ``again``: every round first gives its answers in a run that does not count. Then drafters have read the answers,
    and both runs that count find the prompts in the engine's prefix cache, if it has one.
    """
    found: dict[str, list[Any]] = {}
    for number in (*range(-WARM_ROUNDS, 0), *range(first, first + count)):
        prompts, stop = texts.prompts(kind, batch, number)
        if again:
            worker.complete(prompts, batch.output, stop)
        begun, _ = worker.complete(prompts, 1, stop)
        seconds, outputs = worker.complete(prompts, batch.output, stop)
        if number < 0:
            continue
        tokens, expected = sum(map(len, outputs)), known.setdefault((worker.name, batch.name, number), outputs)
        found.setdefault(f"{batch.name}.decode_tok_s", []).append((tokens - len(outputs)) / max(seconds - begun, 1e-9))
        found.setdefault(f"{batch.name}.drafts", []).append(_drafts(outputs, expected, worker.counts))
    return found


def _drafts(outputs: list[list[int]], expected: list[list[int]], counts: dict[str, int]) -> dict[str, float]:
    return {
        "tokens": sum(map(len, outputs)),
        "repeated_4grams": repeated_grams(outputs),
        "same_outputs": sum(a == b for a, b in zip(outputs, expected)) / len(outputs),
    } | {name: counts.get(name, 0) for name in COUNTS}


def mean(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Mean over all rounds. With drafts it includes their acceptance and the tokens of a verification."""
    found = {name: sum(figures[name] for figures in rounds) / len(rounds) for name in rounds[0]}
    drafted, accepted, verified = (found[name] for name in COUNTS)
    found |= (
        {"acceptance": accepted / max(drafted, 1e-9), "tokens_per_verification": 1 + accepted / verified}
        if verified
        else {}
    )
    return {name: round(value, 4) for name, value in found.items() if verified or name not in COUNTS}
