"""Metrics of a run of agents: rates, first tokens overall and by turn, gaps, and shares of prompts from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvasir.bench.agents_load import Session, every, page_keys
from kvasir.bench.client import Reply
from kvasir.bench.result import percentile, spread
from kvasir.errors import ConfigError

# The tiers that can hold cached tokens. A reply tells their number only. Our server's metrics tell how many of them
# came from each tier.
TIERS = ("device", "host", "disk")
# Percentiles of the time to the first token.
SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of a session, as it was answered."""

    session: Session
    turn: int
    reply: Reply

    @property
    def prompt(self) -> int:
        return self.session.prompts[self.turn]

    @property
    def good(self) -> bool:
        return self.reply.status == 200 and len(self.reply.events) > 0

    @property
    def first_ms(self) -> float:
        return 1000 * (self.reply.events[0] - self.reply.due)


def unlimited_tokens(asked: list[Asked], size: int) -> int:
    """Prompt tokens of good replies that a cache of unlimited size would hold, in whole pages of ``size`` tokens.

    It holds the pages of every prompt that was sent before. A prompt's last token is always computed.
    """
    keys = {s.name: page_keys(s, size) for s in every({a.session.name: a.session for a in asked}.values())}
    seen: set[bytes] = set()
    total = 0
    for one in sorted(asked, key=lambda a: a.reply.sent or a.reply.due):
        own = keys[one.session.name][: one.prompt // size]
        if one.good:
            found = next((i for i, key in enumerate(own) if key not in seen), len(own))
            total += min(found, (one.prompt - 1) // size) * size
        seen.update(own)
    return total


def metrics(asked: list[Asked], output: int, size: int) -> dict[str, Any]:
    """Metrics of one run, from the first due time to the last end. Latencies are in milliseconds.

    ``output``: tokens that each answer should have. ``size``: tokens of a page. First tokens count from when a turn was
    due. Gaps (``itl``) are those between two events with tokens. Tables by turn leave sub-agents out. Raises
    ConfigError for a run without turns.
    """
    if not asked:
        raise ConfigError("no turn started within the seconds of the load: raise them, or lower the pause")
    good = [a for a in asked if a.good]
    seconds = max(a.reply.ended for a in asked) - min(a.reply.due for a in asked)
    prompts, cached = sum(a.prompt for a in good), sum(a.reply.cached for a in good)
    found: dict[str, Any] = {
        "turns": len(asked),
        "failed": len(asked) - len(good),
        "short": sum(a.reply.completion != output for a in good),
        "seconds": round(seconds, 2),
        "turns_s": round(len(good) / max(seconds, 1e-9), 3),
        "output_tok_s": round(sum(a.reply.completion for a in good) / max(seconds, 1e-9), 2),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "cached_share": share(cached, prompts),
        "tier_share": dict.fromkeys(TIERS, 0.0) | {"device": share(cached, prompts)},
        "unlimited_share": share(unlimited_tokens(asked, size), prompts),
    }
    if not good:
        return found
    found |= _percentiles("ttft_ms", [a.first_ms for a in good])
    gaps = [1000 * (b - a) for one in good for a, b in zip(one.reply.events, one.reply.events[1:])]
    found |= {f"itl_ms_p{p * 100:.0f}": round(percentile(gaps, p), 3) for p in (0.5, 0.99) if gaps}
    turns: dict[int, list[float]] = {}
    for one in good:
        if not one.session.depth:
            turns.setdefault(one.turn, []).append(one.first_ms)
    by_turn = {str(turn + 1): _percentiles("ttft_ms", values) for turn, values in sorted(turns.items())}
    for name in _percentiles("ttft_ms", [0.0]):
        found[f"turn_{name}"] = {turn: values[name] for turn, values in by_turn.items()}
    return found


def by_tier(values: dict[str, Any], before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Shares of the prompts by tier of a run with these metrics, from the tokens that the server's tiers gave until it
    began and until it ended."""
    prompts = values["prompt_tokens"]
    found = {tier: share(round(after.get(tier, 0) - before.get(tier, 0)), prompts) for tier in TIERS[1:]}
    return {TIERS[0]: round(max(0.0, values["cached_share"] - sum(found.values())), 4)} | found


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several runs as one: spreads of numbers, and of tables the mean of each entry."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run[name] for run in runs if name in run]
        if isinstance(values[0], dict):
            entries = dict.fromkeys(key for table in values for key in table)
            rows = {key: [table[key] for table in values if key in table] for key in entries}
            found[name] = {key: round(sum(row) / len(row), 4) for key, row in rows.items()}
        else:
            found[name] = spread(values)
    return found


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_p{p * 100:.0f}": round(percentile(values, p), 3) for p in SHARES}
