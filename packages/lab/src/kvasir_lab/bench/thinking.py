"""``kvasir bench thinking``: what ``thinking_token_budget`` costs between tokens, through servers, ours and a peer's.

Weights are random, and every prompt ends with the mark that begins the thinking, so that every answer thinks until its
budget ends it. Three loads of ``batch`` requests: without a budget, with one that no answer reaches, and with one that
forces the end of each in mid-answer. A gap is the time between two events of an answer, taken while all answers decode.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from kvasir.bench.client import Call, Reply, send
from kvasir.bench.provenance import peer_version
from kvasir.bench.result import arm, finish, percentile, ratios_of, result, save
from kvasir.bench.servers import SHARED, Server, flags_of, serving
from kvasir.bench.worker import check_peer
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir_lab.bench.constrained import RESERVED, train_tokenizer

MARKS = ("<think>", "</think>")
THINK = 3  # id of the first mark: it follows the three special tokens of the tokenizer
PARSER = "qwen3"  # a parser of MARKS, by the name that both servers have for it
OUTPUT = 192
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "far": {"thinking_token_budget": 1 << 20},
    "ended": {"thinking_token_budget": OUTPUT // 2},
}


def gaps(replies: list[Reply]) -> list[float]:
    """Seconds between two events of each reply, between the last first token and the first end of all replies."""
    begin, end = max(r.events[0] for r in replies), min(r.events[-1] for r in replies)
    return [b - a for r in replies for a, b in zip(r.events, r.events[1:]) if begin <= a and b <= end]


class Loads:
    """The loads of one server. ``repeats``: how often each counts, after a round that does not."""

    def __init__(self, server: Server, model: str, batch: int, prompt: int, repeats: int) -> None:
        self.server, self.model = server, model
        self.batch, self.prompt, self.repeats = batch, prompt, repeats
        self._draw = random.Random(0)

    def run(self) -> dict[str, Any]:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(1 + self.repeats):
            for kind, extra in KINDS.items():
                seen = gaps(self._send(extra))
                found[kind] += seen if turn else []
        metrics: dict[str, Any] = {}
        for kind, values in found.items():
            metrics[f"{kind}.gap_ms.p50"] = round(1e3 * percentile(values, 0.5), 4)
            metrics[f"{kind}.gap_ms.p99"] = round(1e3 * percentile(values, 0.99), 4)
        for kind in list(KINDS)[1:]:
            for p in ("p50", "p99"):
                over = metrics[f"{kind}.gap_ms.{p}"] / metrics[f"plain.gap_ms.{p}"]
                metrics[f"{kind}.{p}_over_plain"] = round(over, 4)
        return metrics

    def _send(self, extra: dict[str, Any]) -> list[Reply]:
        def prompt() -> list[int]:
            return [self._draw.randrange(300, 1500) for _ in range(self.prompt - 1)] + [THINK]

        calls = [Call(0.0, prompt(), OUTPUT, extra) for _ in range(self.batch)]
        return send(self.server.url, self.server.name, self.model, calls, least=2)


def run(
    options: dict[str, Any],
    *,
    shape: str,
    batch: int,
    prompt: int,
    repeats: int,
    output: Path | None,
    peer: str | None = None,
    site: str | None = None,
    commit: str | None = None,
) -> None:
    """Measure our server, then the peer's, and show the result."""
    if peer:
        check_peer(peer, site)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(shape_folder(shape))
        train_tokenizer(Path(model), SHAPES[shape]["vocab_size"] - RESERVED, marks=MARKS)
        served = ["--load-format", "dummy", "--served-model-name", shape, "--reasoning-parser", PARSER]
        entries: list[dict[str, Any]] = []

        def outcome() -> dict[str, Any]:
            ratios = ratios_of(entries, [("kvasir", peer)] if len(entries) > 1 else [])
            return result(f"thinking-{shape}-{batch}x{prompt}", entries, ratios=ratios)

        for name in ("kvasir", peer) if peer else ("kvasir",):
            given = options if name == "kvasir" else {k: v for k, v in options.items() if k in SHARED}
            flags = flags_of(given) + served
            with serving(name, model, flags, site) as server:
                server.wait()
                metrics = Loads(server, shape, batch, prompt, repeats).run()
            settings = {"flags": flags, "shape": shape} | ({} if name == "kvasir" else peer_version(name, site))
            entries.append(arm(name, settings, metrics))
            save(outcome(), output, commit)  # a run that is cut off keeps what it has
    finish(outcome(), output, commit)
