"""The seam of drafters: who proposes tokens that the model then checks in one forward.

Verification is sampling with position-keyed noise (docs/architecture.md), so nothing a drafter proposes can change a token
of the output: it may be wrong, stale, random, replaced in mid-request or absent. What it changes is how many tokens a
forward yields. A drafter sees sequences and knows nothing of plans; the engine knows nothing of drafters but this protocol.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from kvasir.speculation.tree import DraftTree
from kvasir.technique import Technique
from kvasir.types import Sequence

DRAFTERS = "kvasir.speculation.drafters"
Capture = Callable[[Callable[[], None]], Callable[[], None]]
Place = Literal["cpu", "same_device", "other_device"]


@dataclass(slots=True)  # not frozen: one is made for every sequence and step, in half the time
class Ask:
    """A sequence whose next token is the model's turn, and how large a tree may be proposed for it."""

    seq: Sequence
    max_nodes: int
    max_depth: int


class ChainModel(Protocol):
    """Another causal model with KV pages of its own, as the engine runs it for a drafter."""

    def draw(self, asks: Many[Ask], keep: bool = False) -> list[list[int]]:
        """For each, up to ``max_depth`` tokens after the known ones, drawn with the sequence's own parameters and noise; none
        where the model is still busy with the prompt or has no page left. ``keep``: with fresh noise instead, and what they were
        drawn from is left for the verification (`kvasir.decoding.max_accept`)."""

    def close(self, seq: Sequence) -> None: ...

    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into place, by parameter name."""


class ExitModel(Protocol):
    """The served model up to an early layer, with its weights and pages. ``exits``: after which layers, ascending; ``head_layers``: what
    the head costs, in layers."""

    exits: tuple[int, ...]
    num_layers: int
    head_layers: float

    def draw(self, asks: list[Ask], num_layers: int, stops: list[float]) -> list[tuple[list[int], list[float]]]:
        """As ``ChainModel.draw``, by the first ``num_layers`` layers; and the probability of each token there. A draft ends behind its
        first token whose probability is below its ``stops``."""

    def judge(self, pieces: list[tuple[Sequence, int, Any]]) -> list[list[list[tuple[int, float]]]]:
        """What each exit would have drafted: of (sequence, position of the first row, outputs [rows, exits, E] of the exits' last layers),
        one a sequence, for every exit and row the token and its probability; (-1, 0) where no number came out."""

    def close(self, seq: Sequence) -> None: ...


class Host(Protocol):
    """What the engine offers a drafter when it starts, before the served model takes its memory."""

    def exit_model(self, exits: tuple[int, ...]) -> ExitModel:
        """Usable, and its numbers known, once the served model is there: which then raises ConfigError for a layer that it does
        not have. No ``exits``: after a quarter, a half and three quarters of its layers."""

    def chain_model(self, model: str, kv_tokens: int, keep: bool = False) -> ChainModel:
        """``model``: checkpoint folder or hub id; ``kv_tokens``: tokens its pages hold; ``keep``: as `ChainModel.draw` will be asked.
        Raises ConfigError when its vocabulary is not the served model's, and where ``keep`` would break exact mode."""


class ServedModel(Protocol):
    """What a drafter that lives on the model it drafts for may use of it (`kvasir.models.decoder.Decoder`)."""

    spec: Any
    place: Any
    norm: Any

    def embed(self, ids: Any) -> Any:
        """[..., E]: what the first layer reads for these tokens."""

    def read_out(self, normed: Any) -> Any:
        """Logits [..., V] of normed states [..., E]."""


def check_trees(asks: Many[Ask], trees: Many[DraftTree], vocab_size: int, num_guests: int = 0) -> None:
    """Raise ValueError for what ``Drafter.propose`` must not return: later it would fail the step, or a GPU."""
    if len(trees) != len(asks):
        raise ValueError(
            f"{len(trees)} proposals for {len(asks)} sequences; where there is nothing to propose, an empty DraftTree"
        )
    for ask, tree in zip(asks, trees):
        if not isinstance(tree, DraftTree):
            raise ValueError(f"a proposal is a DraftTree, not {tree!r}")
        if not tree.is_whole(num_guests):
            raise ValueError(
                f"{tree!r} is no tree: parts of nodes are missing, or a node stands before its parent. Build it with chain() and add()"
            )
        if len(tree) > ask.max_nodes or max(tree.depths, default=-1) >= ask.max_depth:
            raise ValueError(
                f"{len(tree)} tokens proposed, {max(tree.depths) + 1} deep; asked were at most {ask.max_nodes}, {ask.max_depth} deep"
            )
        for token, est in zip(tree.tokens, tree.est):
            if not 0 <= token < vocab_size or not 0 <= est <= 1:
                raise ValueError(
                    f"token {token} with an estimate of {est}: tokens are from 0 to {vocab_size - 1}, estimates from 0 to 1"
                )


class Drafter(Technique):
    """``exact`` False: it asks for a verification that keeps the distribution of tokens, not the tokens.
    ``hidden_layers``: layers of the served model whose outputs it reads, known after ``attach``; they are handed to ``ingest``
    and ``observe``, as [rows, layers, E] on the model's device. ``guests``: embeddings [guests, E], in the model's dtype and place, that
    its trees may put behind nodes (`DraftTree.guests`): the model computes such rows beside the step's own, and ``answer`` gets
    what comes out. Known after ``attach``, changed in place only. ``top_tokens``: how many of the likeliest tokens of each verified
    row are handed to ``recycle``. ``place``: where it runs; one on the CPU needs no word of what it missed while
    drafting was off, for it reads the sequence's tokens when asked.
    """

    exact = True
    affects_kv = False
    hidden_layers: tuple[int, ...] = ()
    guests: Any = None
    top_tokens: ClassVar[int] = 0
    place: ClassVar[Place] = "cpu"
    topology: ClassVar[Literal["chain", "tree"]] = "chain"
    version = 0  # of the weights

    @property
    def names(self) -> list[str]:
        """Of the drafters that a request may choose from."""
        return [self.name]

    @property
    def parts(self) -> list[Drafter]:
        """The drafters that run: itself, or several behind one."""
        return [self]

    def prepare(self, host: Host) -> None:
        """Once, before the first request."""

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        """Once, when the served model is there. ``capture``: makes a replay of work on static buffers, where there are CUDA graphs.
        Raises ConfigError when the model cannot be drafted for."""

    def device_bytes(self, model: ServedModel) -> int:
        """Bytes of the model's device that ``attach`` and serving will take, which the KV pool leaves free. Asked before ``attach``, when
        the model's weights may not be there yet; what ``prepare`` has taken is not among them."""
        return 0

    def open(self, seq: Sequence) -> None:
        """A sequence is about to be drafted for, or its hidden states handed over, for the first time."""

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        """The outputs of ``hidden_layers`` for committed rows from position ``start``. Rows may be missing: those of a prefix that was
        in the cache, and of steps at which drafting was off. After a preemption they come again."""

    @abstractmethod
    def propose(self, asks: list[Ask]) -> Many[DraftTree]:
        """One tree for each, maybe empty, of at most ``max_nodes`` tokens of the model's vocabulary, at most ``max_depth`` deep, each with
        an estimate in [0, 1]. Continues ``seq.tokens``, which only ever grow; changes nothing of the sequence but ``seq.state``. Not
        asked while drafts do not pay (``draft_control``). What it raises costs this step's drafts; 8 times in a row, all later ones."""
        raise NotImplementedError

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int], hidden: Any = None) -> None:
        """``tree`` was verified and the nodes of ``path`` were right; ``seq.tokens`` holds them and one more. ``hidden``: of the rows
        committed with it, the last of which is ``seq.num_computed`` - 1."""

    def answer(self, seq: Sequence, tree: DraftTree, node: int, outputs: Any) -> None:
        """After ``observe``, where ``tree`` had guests: the last token was drawn from ``node`` (-1: the anchor), and ``outputs``
        [rows, E], before the final norm, are those of the guests behind it, chain after chain; no rows where it had none."""

    def recycle(self, seq: Sequence, tokens: list[int], top: list[list[int]]) -> None:
        """A verified step's rows: the token of each, right or not, and the ``top_tokens`` likeliest after it, best first."""

    def close(self, seq: Sequence) -> None:
        """The sequence has ended; its tokens are final."""

    def load(self, weights: Any, version: int) -> None:
        """New weights between two steps. Running sequences go on."""
        self.version = version

    def reference(self) -> Drafter | None:
        """The same without native code, as it was made, to compare with; None: it has none."""
        return None

    def state_bytes(self) -> int:
        """Bytes of memory held, roughly, beside what ``Sequence.state`` keeps."""
        return 0
