"""The seam of KV policies: which tokens of a sequence the cache forgets, and when.

*When* is arithmetic on the number of tokens alone: a policy names the next position at which it forgets (``next_due``)
and how many tokens are left then (``left``). No span crosses such a position. So a request forgets at the same
positions in any batch, with any chunk size, after a preemption and in another process. *Which* tokens stay is decided
on the device, layer by layer, by ``keep``; the engine then moves them together and gives back the pages behind them.

Positions stay: a key keeps the rotation of the position that its token had. Order stays, too: what is left stands in
ascending order of positions.

Legend: N tokens in the cache, L rows of a span, G KV heads, R query heads of a KV head, D head dim, C tokens that stay.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.kv.codec import LayerCache, Plane
from kvasir.technique import Technique
from kvasir.types.sequence import NEVER, Forgetting

if TYPE_CHECKING:
    import torch

    from kvasir.types import CacheRow

POLICIES = "kvasir.kv.policies"
Phase = Literal["prompt", "answer"]
Evidence = Literal["none", "last_rows", "answer_rows", "all_rows"]


@dataclass(slots=True)
class Memory:
    """A layer's cached tokens of one sequence, as a policy sees them.

    ``layer``: index of the model's layer. ``pages`` int64 [W] on the device: the pages of the sequence, in order.
    ``count``: tokens in them. ``num_prompt`` and ``length``: the sequence's tokens of the prompt, and those computed.
    ``stream``: its noise stream. ``notes``: whatever the policy keeps of the sequence, by layer; empty when a sequence
    starts."""

    layer: int
    cache: LayerCache
    pages: torch.Tensor
    count: int
    num_prompt: int
    length: int
    stream: int
    notes: dict[int, Any] = field(default_factory=dict)

    def keys(self) -> torch.Tensor:
        """The cached keys [G, N, D], in the model's dtype and basis."""
        return self.cache.codec.read(self.cache, self.pages[None])[0][0, :, : self.count]

    def plane(self, name: str) -> torch.Tensor:
        """A copy [G, N, width] of what a policy has stored beside each token, in a plane of its own."""
        found = self.cache.planes[name].index_select(0, self.pages)
        return found.transpose(0, 1).flatten(1, 2)[:, : self.count]

    def store(self, name: str, numbers_GNW: torch.Tensor, first: int = 0) -> None:
        """Write numbers [G, M, width] beside the tokens from place ``first`` on."""
        import torch

        plane, size = self.cache.planes[name], self.cache.page_slots
        at = torch.arange(first, first + numbers_GNW.shape[1], device=self.pages.device)
        plane[self.pages[at // size], :, at % size] = numbers_GNW.transpose(0, 1).to(plane.dtype)


class KVPolicy(Technique):
    """The base class of KV policies.

    - ``phases``: what is forgotten: tokens of the ``prompt`` once it is computed, or tokens of all kinds while the
      ``answer`` grows. A stack has one policy for each.
    - ``evidence``: what ``observe`` is called with: nothing, the attention of the last ``rows`` rows before a position
      where it forgets (those of a prompt are computed in one span), that of the answer's rows, or that of all rows.
    - ``by_head``: whether ``keep`` chooses other tokens for each KV head.
    - ``by_layer``: whether layers may keep different numbers of tokens.
    - ``query_agnostic``: whether the choice does not depend on the question that the prompt ends with.
    - ``by_request``: the parameters that a request may change. They change what stays, never how much work that is.
    """

    exact = False
    affects_kv = False  # pages are indexed only while nothing was forgotten
    phases: ClassVar[frozenset[Phase]] = frozenset()
    evidence: ClassVar[Evidence] = "none"
    by_head: ClassVar[bool] = False
    by_layer: ClassVar[bool] = False
    query_agnostic: ClassVar[bool] = False
    by_request: ClassVar[tuple[str, ...]] = ()
    rows = 0

    def planes(self, row: CacheRow) -> list[Plane]:
        """The numbers that are stored beside each token and KV head of a layer. They move with the token."""
        return []

    @abstractmethod
    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        """The next position after ``length`` at which this policy forgets; NEVER if it does not.

        ``count`` tokens of the first ``length`` are in the cache, and all after these will be. A position p means:
        when tokens 0 .. p - 1 are computed. Before the end of the prompt, the distance from ``length`` depends on
        ``count`` alone, unless the end of the prompt is due."""
        raise NotImplementedError

    @abstractmethod
    def left(self, num_prompt: int, length: int, count: int) -> int:
        """The number of tokens that stay of ``count``, at a position that ``next_due`` has named."""
        raise NotImplementedError

    def observe(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> None:
        """Take note of the attention fp32 of L consecutive rows, which stand in the last L of the N places: each row's
        weights of the tokens in the cache, 0 for those it does not see. ``first``: the position of the first row."""

    def allot(self, memories: Sequence[Memory], left: int) -> list[int]:
        """The number of tokens that stay in each layer; the same for all, unless ``by_layer``. Their mean is ``left``,
        or less where a layer has fewer tokens."""
        return [left] * len(memories)

    @abstractmethod
    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        """The places int64 [G, C] or [1, C] (all heads alike) that stay, in ascending order. C is ``left``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stack:
    """One policy or two, each for its own phases."""

    policies: tuple[KVPolicy, ...]

    @property
    def by_head(self) -> bool:
        return any(policy.by_head for policy in self.policies)

    @property
    def observers(self) -> list[KVPolicy]:
        return [policy for policy in self.policies if policy.evidence != "none"]

    @property
    def by_layer(self) -> bool:
        return any(policy.by_layer for policy in self.policies)

    @property
    def rows(self) -> int:
        """The number of last rows of a prompt that are computed in one span; 0: it may be cut anywhere."""
        return max((p.rows for p in self.policies if p.evidence == "last_rows" and "prompt" in p.phases), default=0)

    @property
    def drafts(self) -> bool:
        """Whether a sequence may verify drafts: no row of its answer is watched, because rejected rows must not be."""
        return all(p.evidence == "last_rows" and p.phases == {"prompt"} for p in self.observers)

    def plan(self, num_prompt: int, length: int) -> Forgetting:
        """When a sequence with this prompt forgets, and which rows are watched until then. ``length``: the most tokens
        that it computes."""
        first, whole = self.next_due(num_prompt, 0, 0), NEVER
        own = first
        for policy in self.observers:
            # What is stored beside tokens is of one sequence, so that it shares no pages.
            alone = type(policy).planes is not KVPolicy.planes
            watched = {"all_rows": 0, "answer_rows": num_prompt, "last_rows": first - policy.rows}
            own = 0 if alone else min(own, max(0, watched[policy.evidence]))
        if self.rows and first == num_prompt:
            whole = max(0, num_prompt - self.rows)
        return Forgetting(first, own, whole, self.drafts, self.most(num_prompt, length), self)

    def most(self, num_prompt: int, length: int) -> int:
        """The most tokens that are in the cache at once until ``length`` are computed, in any layer."""
        since, most = (0, 0), 0
        while (due := self.next_due(num_prompt, *since)) <= length:
            count, gap = since[1] + due - since[0], due - since[0]
            policy = next(p for p in self.policies if p.next_due(num_prompt, *since) == due)
            left = count if policy.by_layer else policy.left(num_prompt, due, count)
            most = max(most, count)
            if since[1] == left and since[0] > num_prompt:
                return most  # from here on it goes round and round
            if since[1] == left:  # so it does up to the end of the prompt
                due += max(0, (min(num_prompt, length) - due) // gap - 1) * gap
            since = due, left
        return max(most, since[1] + length - since[0])

    def changed(self, text: str, max_rows: int) -> Stack | None:
        """The stack with other parameters, as one request may ask for, ``budget=512``; None for ``off``. Raises
        ConfigError."""
        if text == "off":
            return None
        pairs = dict(pair.partition("=")[::2] for pair in text.split(",") if pair)
        policies: list[KVPolicy] = []
        known: set[str] = set()
        for policy in self.policies:
            mine = {name: value for name, value in pairs.items() if name in policy.by_request}
            known |= mine.keys()
            old = {name: str(value) for name, value in dataclasses.asdict(policy.config).items()} if mine else {}
            policies.append(
                type(policy)(technique.parse(type(policy.config), policy.name, old | mine)) if mine else policy
            )
        if unknown := pairs.keys() - known:
            changes = sorted({name for policy in self.policies for name in policy.by_request})
            raise ConfigError(
                f"kv_policy={text}: a request cannot change '{min(unknown)}' here. It may send 'off', or change "
                f"{', '.join(changes) or 'nothing'}"
            )
        stack = Stack(tuple(policies))
        if stack.rows > max_rows:
            raise ConfigError(f"kv_policy={text}: a step of this server has {max_rows} rows. Take a smaller window")
        return stack

    def watchers(self, plan: Forgetting, num_prompt: int, start: int, length: int) -> list[tuple[KVPolicy, int]]:
        """The policies that watch some of the ``length`` rows from position ``start`` on, and the first rows that they
        watch."""
        end, found = start + length, []
        for policy in self.observers:
            first = {"all_rows": 0, "answer_rows": num_prompt, "last_rows": plan.due - policy.rows}[policy.evidence]
            if end > first and (policy.evidence != "last_rows" or self.at(num_prompt, plan) is policy):
                found.append((policy, max(0, first - start)))
        return found

    def planes(self, row: CacheRow) -> list[Plane]:
        return [plane for policy in self.policies for plane in policy.planes(row)]

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        return min((policy.next_due(num_prompt, length, count) for policy in self.policies), default=NEVER)

    def at(self, num_prompt: int, plan: Forgetting) -> KVPolicy | None:
        """The policy that forgets at the next due position; None: no policy ever does."""
        return next((p for p in self.policies if p.next_due(num_prompt, *plan.since) == plan.due < NEVER), None)


def load(spec: str) -> Stack | None:
    """The stack that a spec names, as ``snapkv:budget=1024+lazy_eviction``; None for "". Raises ConfigError for unknown
    names and parameters, and for two policies of one phase."""
    if not spec or spec == "off":
        return None
    policies = tuple(technique.load(POLICIES, part, KVPolicy) for part in spec.split("+"))
    for i, policy in enumerate(policies):
        for other in policies[:i]:
            if both := policy.phases & other.phases:
                raise ConfigError(
                    f"kv_policy={spec}: both {other.name} and {policy.name} forget tokens of the "
                    f"{' and '.join(sorted(both))}. Name one of them, or with it a policy of the other phase."
                )
    return Stack(policies)


def last_places(count: int, number: int, device: torch.device) -> torch.Tensor:
    """The last ``number`` of ``count`` places [1, number]."""
    import torch

    return torch.arange(count - number, count, device=device)[None]


def best_places(scores_GN: torch.Tensor, number: int) -> torch.Tensor:
    """The places [G, number] of the highest scores of each head, in ascending order. Equal scores: the earlier."""
    order = scores_GN.sort(dim=-1, descending=True, stable=True).indices[:, :number]
    return order.sort(dim=-1).values
