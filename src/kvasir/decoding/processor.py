"""The seam of logit processors: methods that change what a row may draw, by the row's own history.

A processor is one module in `processors/`. It keeps an immutable state a row, made from tokens alone, so that a
sequence that is replayed, preempted or forked has the same state, and every row of a draft has its own.

Processors stand as stage 3b of the sampler's order: after biases and bans, before penalties. Those of one request are
applied in the order in which it names them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from kvasir.technique import Technique
from kvasir.types import ProcessorParams, Thinking

if TYPE_CHECKING:  # the server process needs no arrays
    import numpy as np

PACKAGE = "kvasir.decoding.processors"
# A token that a path may hold for "any token that means nothing to a processor".
ANY_TOKEN = -1

# Token ids [K] int64, and what is added to their logits: one number, or fp32 [K].
Bias: TypeAlias = "tuple[np.ndarray, float | np.ndarray]"
Encode = Callable[[str], list[int]]


class Processor(Technique, abc.ABC):
    """One logit processor. All methods are pure functions of their arguments; states are never changed in place.

    ``reads``: "index" when the bias is a number of the row, known before the tokens ahead of it are: steps overlap as
    if there were none. "tokens" when it depends on the row's history: the draw waits until that was read.
    ``forces``: whether ``force`` may answer a token. ``path``: draft tokens between the known ones, which the state has
    seen, and the row. They may never be drawn.
    """

    affects_kv = False
    reads: ClassVar[Literal["index", "tokens"]] = "tokens"
    forces: ClassVar[bool] = False

    def prepare(self, encode: Encode, thinking: Thinking | None) -> dict[str, tuple[int, ...]]:
        """Return the token ids of the processor's texts, by name, which it finds in ``params.ids``.

        ``encode``: text to ids without special tokens; it raises RequestError where there is no tokenizer.
        ``thinking``: None where the model's marks of thinking are not known. Raises ConfigError for options that
        cannot work with this model."""
        return {}

    @abc.abstractmethod
    def state(self, prompt: list[int], params: ProcessorParams) -> Any:
        """Return the state before the first output token."""

    def advance(self, state: Any, tokens: list[int]) -> Any:
        """Return the state after ``tokens``. Tokens below 0 are ordinary ones (`ANY_TOKEN`)."""
        return state

    def bias(self, state: Any, index: int, path: list[int]) -> Bias | None:
        """Return what is added to the row's logits. ``index``: number of output tokens before the one that the row
        predicts. With ``reads = "index"``, the last of them may be missing from ``state``."""
        return None

    def force(self, state: Any, path: list[int]) -> int | None:
        """Return the only token that the row may draw; None: it is free."""
        return None

    def instead(self, state: Any, path: list[int]) -> tuple[int, int] | None:
        """Return (token, other): where the model would draw ``token``, ``other`` is drawn; its own weight is dropped,
        so that drawing it always means this. -1 for ``other``: ``token`` is ruled out."""
        return None

    def over(self, state: Any) -> bool:
        """Whether the processor wants nothing of any later row. Once all of a request are over, it draws like one
        without them."""
        return False

    def ends_on(self, state: Any) -> int:
        """Return the token that, drawn next, ends the bias of a processor that reads the index; -1: none does."""
        return -1
