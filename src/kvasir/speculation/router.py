"""Several drafters at once: for every request and step, the one whose proposal promises the most tokens a second.

Drafters that copy cost next to nothing, so all of them are asked, and what their proposals are worth is known before one is
chosen: the sum of the chances of their nodes, as learnt of each drafter. A drafter that is a model is known by what was
accepted of it lately, of this request and of all, and costs what its calls took beside the rest of a step; it is asked
where that is more. Now and then a request's turn goes to the next one in line, so that none is judged by old evidence.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.speculation.controller import Survival
from kvasir.speculation.drafter import DRAFTERS, Ask, Capture, Drafter, Host, ServedModel
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

PRIOR_ACCEPTED, PRIOR_WEIGHT = (
    1.0,
    4.0,
)  # tokens of a proposal, before anything is known of a model; what all know of it, for one request
DECAY = 0.95  # of the running means
EXPLORE = 32  # proposals of a request of which one is the next drafter's in line


def load_drafter(spec: str) -> Drafter:
    """``name:key=value`` or several, joined by ``+``; a name may be a file's (`kvasir.technique`). Raises ConfigError."""
    names = "|".join(name.replace("_", "[_-]") for name in technique.names(DRAFTERS))
    parts = re.split(rf"\+(?=(?:{names}|[^:+,=]+\.py)(?:[:+]|$))", spec)
    drafters = [technique.load(DRAFTERS, part, Drafter) for part in parts]
    if len({d.name for d in drafters}) < len(drafters):
        raise ConfigError(f"--drafter {spec} names one drafter twice")
    if len(drafters) > 1 and not all(d.exact for d in drafters):
        alone = next(d.name for d in drafters if not d.exact)
        raise ConfigError(
            f"{alone} with these options must run alone: to choose among drafters by what they propose would bend its distribution. "
            f"Leave the others out, or its options."
        )
    return drafters[0] if len(drafters) == 1 else Router(drafters)


class Router(Drafter):
    """``clock``: seconds, as of ``time.perf_counter``."""

    def __init__(self, drafters: list[Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self.name = "+".join(d.name for d in drafters)
        self.drafters = {d.name: d for d in drafters}
        self.top_tokens = max(d.top_tokens for d in drafters)
        self.place = next((d.place for d in drafters if d.place != "cpu"), "cpu")
        self.topology = "tree" if any(d.topology == "tree" for d in drafters) else "chain"
        self._columns: dict[str, list[int]] = {}  # of the hidden states: those that a drafter reads
        self._cheap = [d.name for d in drafters if d.place == "cpu"]
        self._models = [d.name for d in drafters if d.place != "cpu"]
        self._survival = Survival()
        self._accepted: dict[str, list[float]] = {}  # by model: [tokens accepted, proposals] of all requests
        self._cost = dict.fromkeys(self.drafters, 0.0)  # seconds an ask
        self._rest = 0.0  # seconds of a step beside drafting
        self._ended = 0.0  # when the last proposals were made

    @property
    def names(self) -> list[str]:
        return list(self.drafters)

    @property
    def parts(self) -> list[Drafter]:
        return list(self.drafters.values())

    # --------------------------------------------------------------------------------------------------------- propose

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        began = self._clock()
        if self._ended:
            rest = min(began - self._ended, 4 * self._rest or began - self._ended)
            self._rest = rest if not self._rest else DECAY * self._rest + (1 - DECAY) * rest
        offers: list[dict[str, DraftTree]] = [{} for _ in asks]
        for name in self._cheap:
            self._ask(
                name, [i for i, ask in enumerate(asks) if ask.seq.request.params.drafter in (None, name)], asks, offers
            )
        chosen = [self._choose(ask.seq, found, len(asks)) for ask, found in zip(asks, offers)]
        for name in self._models:
            self._ask(name, [i for i, choice in enumerate(chosen) if choice == name], asks, offers)
        for ask, choice in zip(asks, chosen):
            ask.seq.state["routed"] = choice
        self._ended = self._clock()
        return [found.get(choice, DraftTree()) for found, choice in zip(offers, chosen)]

    def _ask(self, name: str, which: list[int], asks: list[Ask], offers: list[dict[str, DraftTree]]) -> None:
        if not which:
            return
        drafter, began = self.drafters[name], self._clock()
        for i in which:
            self._open(asks[i].seq, name)
        for i, tree in zip(which, drafter.propose([asks[i] for i in which])):
            tree.source = name
            offers[i][name] = tree
        cost = (self._clock() - began) / len(which)
        self._cost[name] = DECAY * self._cost[name] + (1 - DECAY) * cost if self._cost[name] else cost

    def _open(self, seq: Sequence, name: str) -> None:
        opened = seq.state.setdefault("routed_open", set())
        if name not in opened:
            opened.add(name)
            self.drafters[name].open(seq)

    def _choose(self, seq: Sequence, found: dict[str, DraftTree], num_asks: int) -> str:
        pinned = seq.request.params.drafter
        if pinned is not None:
            return pinned
        turn = seq.state["routed_turn"] = seq.state.get("routed_turn", -1) + 1
        if turn % EXPLORE == EXPLORE - 1:
            return list(self.drafters)[turn // EXPLORE % len(self.drafters)]
        rates = {name: 1.0 + sum(self._survival.of(tree)) for name, tree in found.items()}
        for name in self._models:
            share = num_asks * self._cost[name] / self._rest if self._rest else 0.0
            rates[name] = (1.0 + self._mean(seq, name)) / (1.0 + share)
        return max(rates, key=rates.__getitem__)

    def _mean(self, seq: Sequence, name: str) -> float:
        """Tokens accepted of a proposal of ``name`` lately: the request's own, from that of all."""
        mean = PRIOR_ACCEPTED
        for accepted, count in (self._accepted.get(name, (0.0, 0.0)), seq.state.get(("routed", name), (0.0, 0.0))):
            mean = (accepted + PRIOR_WEIGHT * mean) / (count + PRIOR_WEIGHT)
        return mean

    # ----------------------------------------------------------------------------------------------------------- learn

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int], hidden: Any = None) -> None:
        right, reached = set(path), {-1, *path}
        for node, parent in enumerate(tree.parents):
            if parent in reached:
                self._survival.observe(tree.source, tree.depths[node], tree.est[node], node in right)
        for counts in (
            self._accepted.setdefault(tree.source, [0.0, 0.0]),
            seq.state.setdefault(("routed", tree.source), [0.0, 0.0]),
        ):
            counts[0] = DECAY * counts[0] + len(path)
            counts[1] = DECAY * counts[1] + 1.0
        for name, drafter in self.drafters.items():
            if hidden is not None and name in self._columns:
                drafter.observe(seq, tree, path, hidden[:, self._columns[name]])
            elif name == tree.source:
                drafter.observe(seq, tree, path)

    def answer(self, seq: Sequence, tree: DraftTree, node: int, outputs: Any) -> None:
        self.drafters[tree.source].answer(seq, tree, node, outputs)

    def recycle(self, seq: Sequence, tokens: list[int], top: list[list[int]]) -> None:
        for drafter in self.drafters.values():
            if drafter.top_tokens:
                drafter.recycle(seq, tokens, top)

    # ------------------------------------------------------------------------------------------------- passed on to all

    def prepare(self, host: Host) -> None:
        for drafter in self.drafters.values():
            drafter.prepare(host)

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        for drafter in self.drafters.values():
            drafter.attach(model, capture)
        hosts = [d for d in self.drafters.values() if d.guests is not None]
        if len(hosts) > 1:
            raise ConfigError(
                f"{' and '.join(d.name for d in hosts)} both have rows of their own in the model's steps: choose one of them"
            )
        self.guests = hosts[0].guests if hosts else None
        self.hidden_layers = tuple(sorted({layer for d in self.drafters.values() for layer in d.hidden_layers}))
        self._columns = {
            name: [self.hidden_layers.index(layer) for layer in d.hidden_layers]
            for name, d in self.drafters.items()
            if d.hidden_layers
        }

    def device_bytes(self, model: ServedModel) -> int:
        return sum(drafter.device_bytes(model) for drafter in self.drafters.values())

    def open(self, seq: Sequence) -> None:
        """Those that read hidden states are handed them from now on; the others are opened when they are first asked."""
        for name in self._columns:
            self._open(seq, name)

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        for name, columns in self._columns.items():
            self.drafters[name].ingest(seq, hidden[:, columns], start)

    def close(self, seq: Sequence) -> None:
        for name in seq.state.get("routed_open", ()):
            self.drafters[name].close(seq)

    def load(self, weights: Any, version: int) -> None:
        """``weights``: by name of the drafter."""
        super().load(weights, version)
        for name, own in weights.items():
            self.drafters[name].load(own, version)

    def state_bytes(self) -> int:
        return sum(drafter.state_bytes() for drafter in self.drafters.values())
