"""The seam of drafters: a drafter proposes tokens, and the model checks them in one forward.

Verification is sampling with position-keyed noise (docs/architecture.md) and does not look at the draft. In exact mode
a draft therefore cannot change the output, even if it is wrong, stale, random, absent or replaced in mid-request: it
changes only how many tokens a forward yields. Elsewhere the bits of the logits may depend on the rows of a step, so a
tie between tokens may end differently. A drafter sees sequences and knows nothing about plans; the engine knows a
drafter only by this protocol.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from kvasir.speculation.tree import DraftTree
from kvasir.technique import Technique
from kvasir.types import Guess, Guessing, Sequence

DRAFTERS = "kvasir.speculation.drafters"
Capture = Callable[[Callable[[], None]], Callable[[], None]]
# (decoding sequences, their context tokens, draft rows, whether the step is drafted) -> seconds
StepSeconds = Callable[[int, int, int, bool], float]
Place = Literal["cpu", "same_device", "other_device"]


@dataclass(slots=True)  # not frozen: the engine makes one for every sequence and step, and this takes half the time
class Ask:
    """A request for drafts: the sequence to continue and the largest tree that may be proposed for it."""

    seq: Sequence
    max_nodes: int
    max_depth: int


class ChainModel(Protocol):
    """A second causal model with KV pages of its own, which the engine runs for a drafter."""

    def draw(self, asks: Many[Ask], keep: bool = False) -> list[list[int]]:
        """Draw up to ``max_depth`` tokens after the known ones of each sequence, with its own parameters and noise.

        A list is empty where the model is still computing the prompt or has no free page. ``keep``: draw with fresh
        noise and leave the distributions for the verification (`kvasir.decoding.max_accept`)."""

    def expand(self, asks: Many[Ask], trees: Many[DraftTree], first: Many[int]) -> list[Any]:
        """Return the log-weights [rows, V] of what follows the nodes of each tree from ``first`` on, with the
        sequence's own parameters.

        ``first`` is -1 with an empty tree: the row of the last known token. A tree then grows by levels, whose nodes
        stand behind those of the levels before. None where the model is still computing the prompt or has no free
        page."""

    def close(self, seq: Sequence) -> None: ...

    def load(self, weights: Mapping[str, Any]) -> None:
        """Copy weights into place, by parameter name."""


class ExitModel(Protocol):
    """The served model up to an early layer, with the same weights and pages.

    ``exits``: the layers after which it may stop, ascending; ``head_layers``: cost of the head in units of one
    layer."""

    exits: tuple[int, ...]
    num_layers: int
    head_layers: float

    def draw(self, asks: list[Ask], num_layers: int, stops: list[float]) -> list[tuple[list[int], list[float]]]:
        """Draw as ``ChainModel.draw`` does, with the first ``num_layers`` layers only. Return tokens and their
        probabilities.

        A draft ends after its first token whose probability is below the sequence's entry in ``stops``."""

    def judge(self, pieces: list[tuple[Sequence, int, Any]]) -> list[list[list[tuple[int, float]]]]:
        """Tell what each exit would have drafted.

        ``pieces``: one (sequence, position of the first row, outputs [rows, exits, E] of the exits' last layers) a
        sequence. Returns, by sequence, exit and row, the token and its probability; (-1, 0) where the logits are not
        numbers."""

    def close(self, seq: Sequence) -> None: ...


class MTPModel(Protocol):
    """The served model's MTP layer (`kvasir.models.mtp`), whose keys lie in the model's pages."""

    def keep(self, seq: Sequence, hidden_RE: Any, start: int) -> None:
        """Take the last layer's outputs [R, E] of committed rows from position ``start`` on."""

    def settle(self) -> None:
        """Compute the keys of all rows that were taken. Called before pages may go to other sequences."""

    def draw(self, asks: Many[Ask]) -> list[tuple[list[int], list[float]]]:
        """Draw up to ``max_depth`` tokens after the known ones of each sequence, at its temperature and with its noise.
        Return tokens and their chances; none for a sequence whose last row was not taken."""

    def expand(self, asks: Many[Ask], trees: Many[DraftTree], first: Many[int]) -> list[Any]:
        """Return log-weights as ``ChainModel.expand`` does."""

    def close(self, seq: Sequence) -> None: ...


class Host(Protocol):
    """The engine as a drafter sees it at start-up, before the served model takes its memory."""

    def exit_model(self, exits: tuple[int, ...]) -> ExitModel:
        """Return an exit model that becomes usable once the served model is loaded.

        Loading raises ConfigError for a layer that the model does not have. Empty ``exits`` stand for a quarter, a half
        and three quarters of the layers."""

    def mtp_model(self) -> MTPModel:
        """Have the served model loaded with its MTP layer, and return that layer, usable once the model is loaded.

        Loading raises ConfigError for a checkpoint without one."""

    def chain_model(self, model: str, kv_tokens: int, keep: bool = False, trees: bool = False) -> ChainModel:
        """Load a draft model.

        ``model``: checkpoint folder or hub id; ``kv_tokens``: number of tokens that its pages hold; ``keep``: the value
        that `ChainModel.draw` will be called with; ``trees``: whether `ChainModel.expand` will be called. Raises
        ConfigError when ``keep`` would break exact mode. Where the vocabularies are not the same but fit, drafts have
        the served model's ids; otherwise the start fails once that model is known."""


class ServedModel(Protocol):
    """The parts of the served model that a drafter may use (`kvasir.models.decoder.Decoder`)."""

    spec: Any
    place: Any
    norm: Any
    sidecar: Any  # `kvasir.models.sidecar.Sidecar`
    adapters: Any  # `kvasir.models.adapters.AdapterSlots`; None: it has none

    def embed(self, ids: Any) -> Any:
        """Return the inputs [..., E] of the first layer for these tokens."""

    def read_out(self, normed: Any) -> Any:
        """Return the logits [..., V] of normed states [..., E]."""


def check_trees(asks: Many[Ask], trees: Many[DraftTree], vocab_size: int, num_guests: int = 0) -> None:
    """Raise ValueError for proposals that break the contract of ``Drafter.propose``: they would fail the step, or crash
    a GPU."""
    if len(trees) != len(asks):
        raise ValueError(
            f"{len(trees)} proposals for {len(asks)} sequences; where there is nothing to propose, an empty DraftTree"
        )
    for ask, tree in zip(asks, trees):
        if not isinstance(tree, DraftTree):
            raise ValueError(f"a proposal is a DraftTree, not {tree!r}")
        if not tree.is_whole(num_guests):
            raise ValueError(
                f"{tree!r} is no tree: parts of nodes are missing, or a node stands before its parent. "
                "Build it with chain() and add()"
            )
        if len(tree) > ask.max_nodes or max(tree.depths, default=-1) >= ask.max_depth:
            raise ValueError(
                f"{len(tree)} tokens proposed, {max(tree.depths) + 1} deep; "
                f"asked were at most {ask.max_nodes}, {ask.max_depth} deep"
            )
        for token, est in zip(tree.tokens, tree.est):
            if not 0 <= token < vocab_size or not 0 <= est <= 1:
                raise ValueError(
                    f"token {token} with an estimate of {est}: tokens are from 0 to {vocab_size - 1}, "
                    "estimates from 0 to 1"
                )


class Drafter(Technique):
    """The base class of drafters.

    - ``exact``: False asks for a verification that keeps the distribution of the tokens, not the tokens themselves.
    - ``hidden_layers``: layers of the served model whose outputs the drafter reads, known after ``attach``. ``ingest``
      gets these outputs as [rows, layers, E] on the model's device.
    - ``guests``: embeddings [guests, E] in the model's dtype and place, which its trees may put behind nodes
      (`DraftTree.guests`). The model computes these rows together with the step's own, and ``answer`` gets what they
      guess. Known after ``attach``, later changed in place only. ``guessing`` says how they guess; ``guest_variant`` is
      the slot of the resident variant that computes them, 0 for the base model; ``guest_rank``, known after
      ``prepare``, asks for the slot of an adapter of that rank.
    - ``tail``: guests that may stand, as one chain, behind the last row of a prompt and behind another drafter's draft.
    - ``top_tokens``: how many of the most likely tokens of each verified row ``recycle`` gets.
    - ``follows``: it gets the hidden states of all committed rows, also of steps without drafting and of sequences that
      end, so that rows which others find in the prefix cache are complete.
    - ``place``: the device it runs on. CPU drafters are not told about steps without drafting; they read the sequence's
      tokens on the next call.
    """

    exact = True
    affects_kv = False
    hidden_layers: tuple[int, ...] = ()
    guests: Any = None
    guessing = Guessing()
    guest_variant = 0
    guest_rank = 0
    tail: tuple[int, ...] = ()
    top_tokens: ClassVar[int] = 0
    follows = False
    place: ClassVar[Place] = "cpu"
    topology: ClassVar[Literal["chain", "tree"]] = "chain"
    learns: ClassVar[bool] = False  # whether it can learn from what is served (`kvasir.learn`); then it has ``weights``
    version = 0  # counts the weights that ``load`` has brought

    @property
    def names(self) -> list[str]:
        """Names of the drafters that a request may choose from."""
        return [self.name]

    @property
    def parts(self) -> list[Drafter]:
        """The drafters that run: this one, or several that it stands for."""
        return [self]

    @classmethod
    def comes_with(cls, path: Path) -> bool:
        """Whether the checkpoint in this folder brings the weights that the drafter needs, so that ``--drafter auto``
        takes it. Raises ConfigError for a folder that cannot be read."""
        return False

    def prepare(self, host: Host) -> None:
        """Prepare for serving. Called once, before the served model is loaded."""

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        """Take the served model. Called once, when it is loaded.

        ``capture`` turns work on static buffers into a replay where steps are captured (None elsewhere). Raises
        ConfigError when the drafter does not fit the model."""

    def use_times(self, seconds: StepSeconds) -> None:
        """Take the engine's model of step times. Called once, where not every proposal is verified."""

    def device_bytes(self, model: ServedModel) -> int:
        """Number of bytes of the model's device that ``attach`` and serving will take; the KV pool leaves them free.

        Asked before ``attach``, when the model's weights may not be loaded yet. Memory taken by ``prepare`` does not
        count."""
        return 0

    def open(self, seq: Sequence) -> None:
        """Start a sequence: called before its first proposal and before its first hidden states."""

    def ingest(self, seq: Sequence, hidden: Any, start: int) -> None:
        """Read the outputs of ``hidden_layers`` for committed rows from position ``start`` on.

        Rows of a verified draft come after ``observe`` was told of it: up to its anchor, and along the accepted path.
        Rows may be missing: those of a prefix that came from the cache, and those of steps without drafting. After a
        preemption they come again."""

    def settle(self) -> None:  # noqa: B027
        """Finish what ``ingest`` has begun: all rows of a step were handed over, and its pages may go to other
        sequences afterwards. Asked of drafters that ``follow``."""

    @abstractmethod
    def propose(self, asks: list[Ask]) -> Many[DraftTree]:
        """Return one tree for each sequence, which may be empty.

        A tree continues ``seq.tokens``, which only ever grow. It has at most ``max_nodes`` tokens of the model's
        vocabulary, is at most ``max_depth`` deep, and gives each token an estimate in [0, 1]. Only ``seq.state`` may be
        changed. The engine does not ask while drafts do not pay (``draft_control``). An exception costs the drafts of
        this step; eight in a row turn the drafter off."""
        raise NotImplementedError

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int]) -> None:
        """Learn that ``tree`` was verified and the nodes of ``path`` were accepted.

        ``seq.tokens`` holds them and one more token."""

    def answer(self, seq: Sequence, tree: DraftTree, node: int, guesses: list[list[Guess]]) -> None:
        """Read what guest rows guess. Called after ``observe`` for trees with guests, and after a prompt with a
        ``tail``, for which ``tree`` has no nodes.

        The last token was drawn from ``node`` (-1: the anchor). ``guesses`` are those of the guests behind that node,
        chain after chain; there are none where the node had no guests. A row that gave no number has an empty list."""

    def promise(self) -> tuple[float, ...]:
        """Return, by place in a chain of guests, the tokens that the guest there adds to the next step; () where that
        is not known."""
        return ()

    def recycle(self, seq: Sequence, tokens: list[int], top: list[list[int]]) -> None:
        """Read all rows of a verified step: their tokens, accepted or not, and the ``top_tokens`` most likely next
        tokens of each, best first."""

    def close(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; its tokens are final."""

    def weights(self) -> Mapping[str, Any]:
        """The tensors that ``load`` overwrites in place, by name, so that captured work goes on with them; known after
        ``attach``. {}: it has none."""
        return {}

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Take new weights between two steps, whole or not at all. Running sequences go on.

        Raises ValueError, and has changed nothing, for names or shapes other than those of ``weights()``, and for
        numbers that are not finite."""
        from kvasir.speculation.versions import overwrite

        overwrite(self.weights(), weights)
        self.version = version

    def export(self, weights: Mapping[str, Any], folder: Any) -> None:
        """Write weights like those of ``weights()`` as a folder that ``model=`` takes. Asked of drafters that learn."""
        raise NotImplementedError

    def reference(self) -> Drafter | None:
        """Return a fresh copy that runs without native code, to compare with; None when the drafter has no native
        code."""
        return None

    def state_bytes(self) -> int:
        """Rough number of bytes of host memory in use, without what ``Sequence.state`` keeps."""
        return 0
