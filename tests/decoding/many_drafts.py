"""Rules that verify several drafts of one position, as references: exact enumeration and acceptance by formula.

p is the model's distribution [V], q the drafter's [V], both float64; k drafts are drawn from q. A rule says with which
probability each token is emitted (``emits`` [V], which must be p) and how often a draft is accepted.

Sources: multi-round rejection is SpecInfer's (arXiv 2305.09781); without replacement it is that of arXiv 2402.14160.
K-SEQ is SpecTr's (arXiv 2310.15141, algorithm 2). The optimum is that of the transport problem between k drafts and one
token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np


def _rest(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What p has in excess of q, as a distribution; p where there is none."""
    over = np.maximum(p - q, 0.0)
    return over / over.sum() if over.sum() > 0 else p


def _least(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p / q); 1 where q is 0, since such a draft is never drawn."""
    return np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0))


def multi_round(
    p: np.ndarray, q: np.ndarray, k: int, *, replace: bool = True, rest: Callable = _rest
) -> tuple[np.ndarray, float]:
    """Draft by draft: accept x with min(1, p(x) / q(x)), else p becomes what it has in excess of q.

    Without replacement q loses the rejected token. Returns ``emits`` and the probability that a draft is accepted.
    ``rest``: the rule for p after a rejection, for tests that plant another one.
    """
    if k == 0 or not q.sum():
        return p.copy(), 0.0
    taken = _least(p, q)
    emits, accepted = q * taken, float((q * taken).sum())
    refused = q * (1.0 - taken)
    if not refused.sum():
        return emits, accepted
    then = rest(p, q)
    if replace:
        after, more = multi_round(then, q, k - 1, rest=rest)
        return emits + refused.sum() * after, accepted + refused.sum() * more
    for x in np.flatnonzero(refused):
        fewer = np.where(np.arange(len(q)) == x, 0.0, q)
        fewer = fewer / fewer.sum() if fewer.sum() else fewer
        after, more = multi_round(then, fewer, k - 1, replace=False, rest=rest)
        emits, accepted = emits + refused[x] * after, accepted + refused[x] * more
    return emits, accepted


def kseq_factor(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """r in [1, k] with 1 - (1 - beta(r))^k = r beta(r), where beta(r) = sum min(q, p / r), by bisection."""
    low, high = 1.0, float(k)
    for _ in range(200):
        r = (low + high) / 2
        beta = np.minimum(q, p / r).sum()
        low, high = (r, high) if 1.0 - (1.0 - beta) ** k > r * beta else (low, r)
    return high


def kseq(p: np.ndarray, q: np.ndarray, k: int, *, factor: float | None = None) -> tuple[np.ndarray, float]:
    """Accept the first draft x that passes min(1, p(x) / (r q(x))); if none does, draw from the rest of p.

    ``factor``: another r, for tests that plant one. Returns ``emits`` and the probability that a draft is accepted.
    """
    r = kseq_factor(p, q, k) if factor is None else factor
    least = np.minimum(q, p / r)
    beta = least.sum()
    accepted = 1.0 - (1.0 - beta) ** k
    taken = least * accepted / beta if beta > 0 else np.zeros_like(p)
    rest = np.maximum(p - taken, 0.0)
    return taken + (1.0 - accepted) * (rest / rest.sum() if rest.sum() > 0 else p), float(accepted)


def enumerated(
    p: np.ndarray, q: np.ndarray, tuples: dict[tuple[int, ...], float], *, k_seq: bool = False, replace: bool = True
) -> np.ndarray:
    """The distribution [V] of what the rule emits: the sum over all tuples of drafts. ``tuples``: their chances.

    The rule is told q. Where the drafts were drawn in another way, it does not emit p.
    """
    emits = np.zeros_like(p)
    for drafts, chance in tuples.items():
        now, then = p, q
        if k_seq:
            r = kseq_factor(p, q, len(drafts))
            now, then = p / r, q
        for x in drafts:
            taken = min(1.0, now[x] / then[x]) if then[x] > 0 else float(now[x] > 0)
            emits[x] += chance * taken
            chance *= 1.0 - taken
            if k_seq:
                continue
            now = _rest(now, then)
            if not replace:
                then = np.where(np.arange(len(q)) == x, 0.0, then)
                then = then / then.sum() if then.sum() else then
        if k_seq:
            least = np.minimum(q, now)
            beta = least.sum()
            kept = least * (1.0 - (1.0 - beta) ** len(drafts)) / beta if beta > 0 else np.zeros_like(p)
            now = np.maximum(p - kept, 0.0)
            now = now / now.sum() if now.sum() > 0 else p
        emits += chance * now
    return emits


def drawn(q: np.ndarray, k: int, *, replace: bool = True) -> dict[tuple[int, ...], float]:
    """The chance of every tuple of k drafts from q; fewer than k where q has fewer tokens."""
    found = {(): 1.0}
    for _ in range(k):
        longer: dict[tuple[int, ...], float] = {}
        for drafts, chance in found.items():
            rest = q if replace else np.where(np.isin(np.arange(len(q)), drafts), 0.0, q)
            if not rest.sum():
                longer[drafts] = longer.get(drafts, 0.0) + chance
                continue
            for x in np.flatnonzero(rest):
                longer[*drafts, int(x)] = chance * rest[x] / rest.sum()
        found = longer
    return found


def optimum(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The best that any rule can accept with k independent drafts; V up to some 12.

    Drafts and token form a bipartite flow, token y below every tuple that holds it. By max-flow min-cut its value is
    the least p(A) + 1 - q(A)^k over all sets A of tokens, which is the linear programme's optimum without solving it.
    """
    return min(
        float(p[list(inside)].sum() + 1.0 - q[list(inside)].sum() ** k)
        for choice in product((False, True), repeat=len(p))
        for inside in [np.flatnonzero(choice)]
    )


def programme(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The same optimum as a linear programme, solved by the simplex method: for small V and k.

    A variable is the mass of a tuple of drafts that becomes a token of it. Their sum is largest where no tuple gives
    more than its chance and no token gets more than p."""
    tuples = list(product(range(len(p)), repeat=k))
    pairs = [(t, y) for t in range(len(tuples)) for y in sorted(set(tuples[t]))]
    rows = len(tuples) + len(p)
    table = np.zeros((rows + 1, len(pairs) + rows + 1))
    for column, (t, y) in enumerate(pairs):
        table[t, column] = table[len(tuples) + y, column] = 1.0
    table[:rows, len(pairs) : -1] = np.eye(rows)
    table[:rows, -1] = [*(np.prod(q[list(drafts)]) for drafts in tuples), *p]
    table[-1, : len(pairs)] = -1.0
    basis = list(range(len(pairs), len(pairs) + rows))
    while (enters := np.flatnonzero(table[-1, :-1] < -1e-12)).size:
        column = enters[0]  # Bland's rule: the first of all, which never goes round in circles
        up = np.flatnonzero(table[:rows, column] > 1e-12)
        steps = table[up, -1] / table[up, column]
        row = min(up[steps <= steps.min() + 1e-15], key=lambda r: basis[r])
        basis[row] = column
        table[row] /= table[row, column]
        others = np.arange(rows + 1) != row
        table[others] -= np.outer(table[others, column], table[row])
    return float(table[-1, -1])


def coupled(p: np.ndarray, q: np.ndarray, k: int, draws: int, rng: np.random.Generator) -> float:
    """How often the token, drawn with the same Gumbel noise, is one of the drafter's k likeliest: our own rule.

    The drafts are the k largest of log q + noise, and the model's token is the argmax of log p + noise, so tokens are
    plain's by construction. An estimate over ``draws`` draws.
    """
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
    hits = 0
    for _ in range(draws):
        noise = rng.gumbel(size=len(p))
        hits += int((log_p + noise).argmax()) in np.argpartition(-(log_q + noise), k - 1)[:k]
    return hits / draws
