"""Figures from outcomes of an evaluation: the scores of one configuration, and two configurations compared.

Shape suffixes: N problems, S samples a problem.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvasir_lab.evaluation import statistics as stats
from kvasir_lab.evaluation.evaluator import Answers, Losses, Outcome


def figures(outcome: Outcome, seed: int = 0) -> dict[str, Any]:
    """The metrics of one task as numbers for a result file, with 95 % intervals."""
    return _loss_figures(outcome, seed) if isinstance(outcome, Losses) else _answer_figures(outcome, seed)


def _answer_figures(outcome: Answers, seed: int) -> dict[str, Any]:
    count, samples = outcome.right.shape
    shares = outcome.right.mean(1)
    # One reply a problem is a count. Samples of the same problem are not independent, so a pool needs the bootstrap.
    interval = stats.wilson(int(outcome.right.sum()), count) if samples == 1 else stats.mean_interval(shares, seed=seed)
    found = {
        "problems": count,
        "different_problems": len({p.prompt for p in outcome.exam.problems}),
        "samples": samples,
        "right": int(outcome.right.sum()),
        "exact": float(shares.mean()),
        "interval": list(interval),
        "tokens_per_reply": float(outcome.tokens.mean()),
        "output_tokens": int(outcome.tokens.sum()),
        "prompt_tokens": sum(map(len, outcome.exam.prompts)),
        "cut_replies": outcome.num_cut,
        "reply_limit": outcome.exam.limit,
        "seconds": round(outcome.seconds, 3),
        "by_difficulty": _by_difficulty(outcome),
    }
    tallies = [
        outcome.exam.task.tally(p, text) for p, texts in zip(outcome.exam.problems, outcome.texts) for text in texts
    ]
    if tallies and tallies[0]:
        found["tally"] = {name: sum(tally[name] for tally in tallies) for name in tallies[0]}
    if samples > 1:
        kinds = {"pass": pass_values}
        if any(vote is not None for votes in outcome.votes for vote in votes):  # some tasks have no votes
            kinds["majority"] = majority_values
        for name, values_of in kinds.items():
            values = {k: values_of(outcome, k) for k in pool_sizes(samples)}
            found[name] = {
                str(k): {"share": float(v.mean()), "interval": list(stats.mean_interval(v, seed=seed))}
                for k, v in values.items()
            }
    return found


def pool_sizes(samples: int) -> list[int]:
    """The pool sizes to report: 1, 2, 4, ... and the whole pool."""
    return sorted({1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples})


def pass_values(outcome: Answers, k: int) -> np.ndarray:
    """Chance [N] that one of ``k`` samples is right."""
    samples = outcome.right.shape[1]
    return np.array([stats.pass_at_k(int(row.sum()), samples, k) for row in outcome.right])


def majority_values(outcome: Answers, k: int) -> np.ndarray:
    """Chance [N] that the most frequent canonical answer of ``k`` samples is right."""
    return np.array([stats.majority_at_k(votes, row.tolist(), k) for votes, row in zip(outcome.votes, outcome.right)])


def _by_difficulty(outcome: Answers) -> dict[str, dict[str, float]]:
    """Share of right replies by the task's own measure of difficulty, with its interval.

    With candidates of the model's own, also the share without candidates.
    """
    found: dict[int, list[int]] = {}
    for i, problem in enumerate(outcome.exam.problems):
        found.setdefault(problem.difficulty, []).append(i)
    shares = outcome.right.mean(1)

    def interval(index: list[int]) -> stats.Interval:
        marks = outcome.right[index]
        return stats.wilson(int(marks.sum()), len(index)) if marks.shape[1] == 1 else stats.mean_interval(shares[index])

    return {
        str(d): {"problems": len(index), "exact": float(shares[index].mean()), "interval": list(interval(index))}
        | ({} if outcome.alone is None else {"alone": float(outcome.alone[index].mean())})
        for d, index in sorted(found.items())
    }


def _loss_figures(outcome: Losses, seed: int) -> dict[str, Any]:
    nats, tokens, size = outcome.nats.sum(), outcome.tokens.sum(), outcome.bytes.sum()
    low, high = stats.bootstrap(outcome.nats, outcome.tokens, seed=seed)
    bits_low, bits_high = stats.bootstrap(outcome.nats / math.log(2), outcome.bytes, seed=seed)
    found = {
        "documents": len(outcome.nats),
        "scored_tokens": int(tokens),
        "scored_bytes": int(size),
        "perplexity": math.exp(nats / tokens),
        "perplexity_interval": [math.exp(low), math.exp(high)],
        "bits_per_byte": float(nats / math.log(2) / size),
        "interval": [bits_low, bits_high],
        "seconds": round(outcome.seconds, 3),
    }
    if outcome.known_bits is not None:
        found["source_bits_per_byte"] = float(outcome.known_bits.sum() / size)
    return found


def compare(first: Outcome, second: Outcome, seed: int = 0) -> dict[str, Any]:
    """Compare ``second`` with ``first`` on the same problems: difference, interval, and problems needed to see it.

    With one reply a problem, McNemar's exact test is added. For prose the difference is in bits a byte, and less is
    better.
    """
    if isinstance(first, Losses) and isinstance(second, Losses):
        bits = (second.nats - first.nats) / math.log(2)
        interval = stats.bootstrap(bits, first.bytes, seed=seed)
        return {
            "unit": "bits per byte",
            "documents": len(bits),
            "difference": float(bits.sum() / first.bytes.sum()),
            "interval": list(interval),
            "documents_needed": stats.problems_needed(bits / first.bytes.mean()),
        }
    assert isinstance(first, Answers) and isinstance(second, Answers), "one task is scored in one way"
    differences = second.right.mean(1) - first.right.mean(1)
    found = {
        "unit": "share right",
        "problems": len(differences),
        "difference": float(differences.mean()),
        "interval": list(stats.difference_interval(differences, seed=seed)),
        "problems_needed": stats.problems_needed(differences),
        "extra_tokens_per_reply": float(second.tokens.mean() - first.tokens.mean()),
    }
    if first.right.shape[1] == second.right.shape[1] == 1:
        lost, won = int((differences < 0).sum()), int((differences > 0).sum())
        found |= {"only_first": lost, "only_second": won, "mcnemar_p": stats.mcnemar(lost, won)}
    return found
