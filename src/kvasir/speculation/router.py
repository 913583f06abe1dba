"""Run several drafters: each request and step takes the proposal that promises the most tokens a second.

Drafters that copy text cost next to nothing, so all of them are asked, and the value of their proposals is known before
one is chosen: the sum of the survivals of their nodes, as learnt for each drafter. The value of a drafter that is a
model is what was accepted of its recent proposals, for this request and for all; its price is the time of its calls
relative to the rest of a step. It is asked where it promises more. Now and then a request tries the next drafter in
line, so that none is judged by old evidence.
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
from kvasir.types import Guess, Sequence

PRIOR_ACCEPTED = 1.0  # accepted tokens of a model's proposal, assumed before there is evidence
PRIOR_WEIGHT = (
    4.0  # proposals that a prior counts for: the constant for all requests, and all requests for a single one
)
DECAY = 0.95  # factor of the running means, at each observation
EXPLORE = 32  # one in so many proposals of a request goes to the next drafter in line


def load_drafter(spec: str) -> Drafter:
    """Load ``name:key=value``, or several joined by ``+``. A name may be a file (`kvasir.technique`). Raises
    ConfigError."""
    names = "|".join(name.replace("_", "[_-]") for name in technique.names(DRAFTERS))
    parts = re.split(rf"\+(?=(?:{names}|[^:+,=]+\.py)(?:[:+]|$))", spec)
    drafters = [technique.load(DRAFTERS, part, Drafter) for part in parts]
    if len({d.name for d in drafters}) < len(drafters):
        raise ConfigError(f"--drafter {spec} names one drafter twice")
    if len(drafters) > 1 and not all(d.exact for d in drafters):
        alone = next(d.name for d in drafters if not d.exact)
        raise ConfigError(
            f"{alone} with these options must run alone: choosing among drafters by what they propose would bend its "
            f"distribution. Leave the others out, or its options."
        )
    return drafters[0] if len(drafters) == 1 else Router(drafters)


class Router(Drafter):
    """Several drafters behind the protocol of one. ``clock``: returns seconds, like ``time.perf_counter``."""

    def __init__(self, drafters: list[Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self.name = "+".join(d.name for d in drafters)
        self.drafters = {d.name: d for d in drafters}
        self.top_tokens = max(d.top_tokens for d in drafters)
        self.place = next((d.place for d in drafters if d.place != "cpu"), "cpu")
        self.follows = any(d.follows for d in drafters)
        self.topology = "tree" if any(d.topology == "tree" for d in drafters) else "chain"
        self._host: Drafter | None = None  # the one that has guests
        self._columns: dict[str, list[int]] = {}  # by drafter: indices of the tapped layers that it reads
        self._cheap = [d.name for d in drafters if d.place == "cpu"]
        self._models = [d.name for d in drafters if d.place != "cpu"]
        self._survival = Survival()
        self._accepted: dict[str, list[float]] = {}  # by model: [accepted tokens, proposals] over all requests
        self._cost = dict.fromkeys(self.drafters, 0.0)  # seconds for each sequence asked
        self._rest = 0.0  # seconds of a step without drafting
        self._ended = 0.0  # time at which the last proposals were complete

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
        trees = [found.get(choice, DraftTree()) for found, choice in zip(offers, chosen)]
        if self._host is not None:
            for i, (ask, found) in enumerate(zip(asks, offers)):
                if not trees[i].tokens and ask.seq.request.params.drafter is None:
                    best = max(found.values(), key=lambda tree: sum(self._survival.of(tree)), default=trees[i])
                    trees[i] = best if best.tokens else trees[i]
                self._host_with(ask, trees[i])
        return trees

    def _host_with(self, ask: Ask, tree: DraftTree) -> None:
        """Let the guests' drafter prepare its next draft behind another drafter's likeliest path."""
        if self.tail and not tree.guests and ask.seq.request.params.drafter in (None, self._host.name):
            node = -1
            for other, parent in enumerate(tree.parents):
                node = other if parent == node else node
            tree.guests, tree.promise = {node: (self.tail,)}, self._host.promise()

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
        """Recent mean of accepted tokens of a proposal of ``name`` for this request, with the mean of all as the
        prior."""
        mean = PRIOR_ACCEPTED
        for accepted, count in (self._accepted.get(name, (0.0, 0.0)), seq.state.get(("routed", name), (0.0, 0.0))):
            mean = (accepted + PRIOR_WEIGHT * mean) / (count + PRIOR_WEIGHT)
        return mean

    # ----------------------------------------------------------------------------------------------------------- learn

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int]) -> None:
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
        if tree.source in self.drafters:
            self.drafters[tree.source].observe(seq, tree, path)

    def answer(self, seq: Sequence, tree: DraftTree, node: int, guesses: list[list[Guess]]) -> None:
        self._open(seq, self._host.name)
        self._host.answer(seq, tree, node, guesses)

    def recycle(self, seq: Sequence, tokens: list[int], top: list[list[int]]) -> None:
        for drafter in self.drafters.values():
            if drafter.top_tokens:
                drafter.recycle(seq, tokens, top)

    # ------------------------------------------------------------------------------------------------- passed on to all

    def prepare(self, host: Host) -> None:
        for drafter in self.drafters.values():
            drafter.prepare(host)
        self.guest_rank = max(drafter.guest_rank for drafter in self.drafters.values())

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        for drafter in self.drafters.values():
            drafter.attach(model, capture)
        hosts = [d for d in self.drafters.values() if d.guests is not None]
        if len(hosts) > 1:
            raise ConfigError(
                f"{' and '.join(d.name for d in hosts)} both have rows of their own in the model's steps: "
                "choose one of them"
            )
        self._host = hosts[0] if hosts else None
        if self._host is not None:
            self.guests, self.guessing, self.tail = self._host.guests, self._host.guessing, self._host.tail
            self.guest_variant = self._host.guest_variant
        self.hidden_layers = tuple(sorted({layer for d in self.drafters.values() for layer in d.hidden_layers}))
        self._columns = {
            name: [self.hidden_layers.index(layer) for layer in d.hidden_layers]
            for name, d in self.drafters.items()
            if d.hidden_layers
        }

    def device_bytes(self, model: ServedModel) -> int:
        return sum(drafter.device_bytes(model) for drafter in self.drafters.values())

    def open(self, seq: Sequence) -> None:
        """Open the drafters that read hidden states; the others are opened when they are first asked."""
        for name in self._columns:
            self._open(seq, name)

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        for name, columns in self._columns.items():
            self.drafters[name].ingest(seq, hidden[:, columns], start)

    def settle(self) -> None:
        for drafter in self.drafters.values():
            drafter.settle()

    def close(self, seq: Sequence) -> None:
        for name in seq.state.get("routed_open", ()):
            self.drafters[name].close(seq)

    def load(self, weights: Any, version: int) -> None:
        """Hand new weights on. ``weights``: by name of the drafter. Each drafter takes its own whole or not at all."""
        for name, own in weights.items():
            self.drafters[name].load(own, version)
        self.version = version

    def state_bytes(self) -> int:
        return sum(drafter.state_bytes() for drafter in self.drafters.values())
