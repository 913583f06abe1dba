"""Figures of a run: accuracy against cost in several currencies, because rankings differ between them.

The caller says which replies are right; no strategy sees that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvasir.scaling.ledger import AMOUNTS
from kvasir.scaling.primitives import Event
from kvasir.scaling.solve import Solution

CURRENCIES = ("output_tokens", "tokens", "flops", "dollars", "seconds", "device_seconds")


def costs(amounts: dict[str, float]) -> dict[str, float]:
    """A ledger's sums in the currencies. Output includes discarded tokens; ``tokens`` are all computed ones."""
    output = amounts["generated"] + amounts["discarded"]
    return {
        "output_tokens": output,
        "tokens": output + amounts["uncached"],
        "flops": amounts["flops"],
        "dollars": amounts["dollars"],
    }


def figures(solution: Solution, right: Sequence[bool]) -> dict[str, Any]:
    """The metrics of one arm.

    ``right``: whether the chosen reply to each problem is right. Costs are of the whole run; ``per_problem`` holds
    their means. ``E3``: accuracy squared over the output tokens a problem (Plan-and-Budget, arXiv 2505.16122).
    """
    count, total = len(right), solution.ledger.total()
    found: dict[str, Any] = {
        "problems": count,
        "right": sum(right),
        "exact": sum(right) / count if count else 0.0,
        "unanswered": sum(s.result.answer is None for s in solution.solved),
        "ended_by_budget": sum(bool(s.result.why) for s in solution.solved),
        "agreement": round(sum(s.result.agreement for s in solution.solved) / max(1, count), 4),
    }
    found |= {name: total[name] for name in AMOUNTS if name != "seconds"} | costs(total)
    found |= {"seconds": round(solution.seconds, 3)} if solution.seconds is not None else {}
    found |= {"device_seconds": round(sum(solution.busy.values()), 3)} if solution.busy is not None else {}
    made = found["output_tokens"]
    found["wasted"] = round(total["discarded"] / made, 4) if made else 0.0
    found["lost_tokens"] = sum(c.discarded for c in solution.ledger.charges if c.kind == "lost")
    found["per_problem"] = {name: found[name] / max(1, count) for name in CURRENCIES if name in found}
    output = found["per_problem"]["output_tokens"]  # E3 hides both numbers it is made of: read it next to them
    found["E3"] = round(found["exact"] ** 2 / output, 8) if output else 0.0
    found["by_model"] = {
        name: {**{k: v for k, v in sums.items() if k != "seconds"}, **costs(sums)}
        for name, sums in solution.ledger.by_endpoint().items()
    }
    for name, seconds in (solution.busy or {}).items():
        if name in found["by_model"]:
            found["by_model"][name]["device_seconds"] = round(seconds, 3)
    return found


def loops(
    solution: Solution, check: Callable[[int, str], bool], answer: Callable[[str], str | None]
) -> list[dict[str, float]]:
    """Quality of populations by loop: mean accuracy, share of problems with a right candidate, and different answers.

    ``check(i, text)``: whether a text solves problem i. Empty for strategies without populations.
    """
    depth = max((len(s.result.populations) for s in solution.solved), default=0)
    found = []
    for t in range(depth):
        rows = [
            (i, s.result.populations[t])
            for i, s in enumerate(solution.solved)
            if len(s.result.populations) > t and s.result.populations[t]
        ]
        marks = [[check(i, text) for text in texts] for i, texts in rows]
        found.append(
            {
                "loop": t,
                "problems": len(rows),
                "mean": round(sum(sum(m) / len(m) for m in marks) / max(1, len(marks)), 4),
                "any": round(sum(map(any, marks)) / max(1, len(marks)), 4),
                "answers": round(sum(len({answer(x) for x in texts}) for _, texts in rows) / max(1, len(rows)), 4),
            }
        )
    return found


def frontier(arms: Sequence[tuple[str, dict[str, Any]]], currency: str) -> list[dict[str, Any]]:
    """Every arm, cheapest first.

    ``on_frontier``: no other arm is at least as good in both cost and accuracy, and better in one.
    """
    points = [{"arm": name, "cost": m["per_problem"][currency], "exact": m["exact"]} for name, m in arms]
    for p in points:
        p["on_frontier"] = not any(
            q["cost"] <= p["cost"] and q["exact"] >= p["exact"] and (q["cost"], -q["exact"]) != (p["cost"], -p["exact"])
            for q in points
        )
    return sorted(points, key=lambda p: (p["cost"], -p["exact"]))


class Tally:
    """The numbers of a progress bar, from events: problems done, tokens, dollars, mean agreement, populations."""

    def __init__(self) -> None:
        self.done, self.agreement, self.output, self.dollars, self.retries = 0, 0.0, 0, 0.0, 0
        self.loops, self.answers = 0, 0  # number of populations, and sum of their different answers

    def add(self, event: Event) -> None:
        self.retries += event["event"] == "retry"
        if event["event"] == "loop":
            self.loops += 1
            self.answers += event["answers"]
        if event["event"] == "end":
            self.done += 1
            self.agreement += event["agreement"]
            self.output += int(event["generated"] + event["discarded"])
            self.dollars += event["dollars"]

    def __str__(self) -> str:
        money = f"${self.dollars:.4f} · " if self.dollars else ""
        again = f" · {self.retries} retries" if self.retries else ""
        populations = f" · {self.loops} loops, {self.answers / self.loops:.1f} answers each" if self.loops else ""
        return f"{self.output:,} tokens · {money}{self.agreement / max(1, self.done):.0%} agree{populations}{again}"
