"""Compare rules that verify several drafts of one position, on synthetic pairs of model and drafter (V = 1,000).

    python -m kvasir_lab.studies many_drafts RESULT.json [--pairs 12] [--draws 2000]

The model's logits are N(0, 9), the drafter's are these plus noise N(0, e^2), both at temperature T. For each rule the
result holds how often one of k drafts is accepted, as a mean over pairs. The rules are those of
``tests/decoding/many_drafts.py``; ``coupled`` is the rule of the walk, which keeps tokens too, and ``top`` takes the
drafter's k likeliest tokens without noise.
"""

from __future__ import annotations

import statistics

import numpy as np

from kvasir_lab.study import Arms, Report, study
from tests.decoding.many_drafts import coupled, kseq, multi_round

VOCAB = 1000
LOADS = [(0.3, 1.0, 2), (0.6, 0.5, 2), (0.6, 1.0, 2), (0.6, 1.0, 4), (1.0, 1.0, 4), (1.0, 0.7, 8)]  # e, T, k


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def without_replacement(p: np.ndarray, q: np.ndarray, k: int, draws: int, rng: np.random.Generator) -> float:
    """Estimate the acceptance of multi-round rejection without replacement, whose sum has V^k terms."""
    accepted = 0.0
    for _ in range(draws):
        chance, model, drafter = 1.0, p, q
        for _ in range(k):
            x = rng.choice(len(p), p=drafter)
            chance *= 1.0 - min(1.0, model[x] / drafter[x])
            model = np.maximum(model - drafter, 0.0)
            if chance == 0.0 or not model.sum():
                break
            model, drafter = model / model.sum(), np.where(np.arange(len(p)) == x, 0.0, drafter)
            drafter = drafter / drafter.sum()
        accepted += 1.0 - chance
    return accepted / draws


@study("many-drafts")
def main(report: Report, *, pairs: int = 12, draws: int = 2000) -> Arms:
    for noise, temperature, k in LOADS:
        rng, found = np.random.default_rng(7), []
        for _ in range(pairs):
            logits = rng.normal(0.0, 3.0, VOCAB)
            p = softmax(logits / temperature)
            q = softmax((logits + rng.normal(0.0, noise, VOCAB)) / temperature)
            found.append(
                {
                    "one_draft": float(np.minimum(p, q).sum()),
                    "multi_round": multi_round(p, q, k)[1],
                    "without_replacement": without_replacement(p, q, k, draws, rng),
                    "kseq": kseq(p, q, k)[1],
                    "top": float(p[np.argsort(-q)[:k]].sum()),
                    "coupled": coupled(p, q, k, draws, rng),
                }
            )
        metrics = {name: round(float(statistics.mean(pair[name] for pair in found)), 4) for name in found[0]}
        settings = {"noise": noise, "temperature": temperature, "drafts": k, "pairs": pairs}
        yield f"e{noise:g}-T{temperature:g}-k{k}", settings, metrics
