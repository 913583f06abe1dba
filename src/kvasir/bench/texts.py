"""Prompts with structure, for engines that draft: how fast they are on them, and how much of what they proposed was
right.

``repeated``: a passage of ``PASSAGE`` random tokens again and again, after which random weights soon repeat themselves,
too. ``tasks``: problems of the lab, for its models, which end where the model ends them; ``edits``: solutions to be
repaired or combined, which copies most of them. Everything is greedy, so every engine should put out what it puts out
without drafts, up to near-ties; the share that is the same is measured. Rates are of decoding: the tokens after the
first ones, over the time beyond what the prompts and one token take alone.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Any

from kvasir.bench.speculation import repeated_grams
from kvasir.bench.worker import Worker
from kvasir.bench.workloads import Batch
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve

PASSAGE = 48
TASKS = {"tasks": ("chain", "state", "schema", "template"), "edits": ("refine/chain", "aggregate/chain")}  # of the lab
COUNTS = ("drafted", "accepted", "verified")  # tokens, and sequences times steps in which they had a draft
# Rounds on other prompts before anything counts: kernels and graphs of drafted steps, the controller's first trials.
WARM_ROUNDS = 2
Known = dict[tuple[str, str, int], list[list[int]]]  # (engine, workload, round) -> what its first arm put out


class Texts:
    """Prompts for one model. ``vocab``: ids below it are drawn."""

    def __init__(self, model: str, vocab: int) -> None:
        self._model, self._vocab = model, vocab

    @cached_property
    def _tokenizer(self) -> Any:
        from kvasir.lab import tokenizer as lab_tokenizer

        return lab_tokenizer.load(resolve(self._model))

    def prompts(self, kind: str, batch: Batch, number: int) -> tuple[list[list[int]], list[int]]:
        """Prompts of round ``number``, the same for all engines, and the tokens that end an answer."""
        if kind == "repeated":
            rng, found = random.Random(f"{batch.name} {number}"), []
            for _ in range(batch.batch):
                passage = [rng.randrange(self._vocab // 64, self._vocab - self._vocab // 64) for _ in range(PASSAGE)]
                found.append((passage * -(-batch.prompt // PASSAGE))[: batch.prompt])
            return found, []
        from kvasir.lab.lookup import load_task

        tasks = [load_task(spec) for spec in TASKS[kind]]
        drawn = [
            tasks[i % len(tasks)].problems("test", 1000 + number * batch.batch + i, 1)[0] for i in range(batch.batch)
        ]
        found = [self._tokenizer.encode(problem.prompt, add_special_tokens=False).ids for problem in drawn]
        if (longest := max(map(len, found))) > batch.prompt:
            raise ConfigError(
                f"workload {batch.name}: a problem has {longest} tokens: let prompts be longer than {batch.prompt}"
            )
        return found, [self._tokenizer.token_to_id("<|im_end|>")]


def life(
    worker: Worker, kind: str, batch: Batch, texts: Texts, count: int, first: int, known: Known
) -> dict[str, list[Any]]:
    """Metrics of one life of an engine, a value a round: the rate, and the counts of drafts."""
    found: dict[str, list[Any]] = {}
    for number in (*range(-WARM_ROUNDS, 0), *range(first, first + count)):
        prompts, stop = texts.prompts(kind, batch, number)
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
    """Mean over all rounds; with drafts also their acceptance and the tokens of a verification."""
    found = {name: sum(figures[name] for figures in rounds) / len(rounds) for name in rounds[0]}
    drafted, accepted, verified = (found[name] for name in COUNTS)
    found |= (
        {"acceptance": accepted / max(drafted, 1e-9), "tokens_per_verification": 1 + accepted / verified}
        if verified
        else {}
    )
    return {name: round(value, 4) for name, value in found.items() if verified or name not in COUNTS}
