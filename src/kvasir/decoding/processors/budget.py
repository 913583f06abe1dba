"""Bound how long an answer thinks: force its end, or go on in place of an early one (s1, arXiv 2501.19393).

The answer goes through THINK, FORCE and ANSWER. After ``max_thinking`` tokens of thinking, ``end`` is forced, which
holds the end mark. Where the model would end its thinking although it has not reached ``min_thinking``, or has not
tried ``num_ignore`` times before, ``wait`` is put in place of the mark. Forced tokens count as if the model had
written them, and come in one step. A draw costs the host what a penalty does.

While an end would be ignored, the first token of ``wait`` takes over the mark's weight and loses its own, so that
drawing it means an ignored end and nothing else. A mark of several tokens counts as tried with its first. The text that
is forced never exceeds ``max_thinking``: a ``wait`` that would not fit is not put in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvasir.decoding.processor import Processor
from kvasir.decoding.thinking import Thought, begin, follow
from kvasir.errors import ConfigError
from kvasir.types import ProcessorParams

NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class Config:
    """``max_thinking``, ``min_thinking``: tokens between the marks; -1 for the first: no limit. ``num_ignore``: early
    ends that are ignored. ``end``: text that ends the thinking; empty: the model's end mark. ``wait``: text in place of
    an ignored end; empty: the end is only ruled out."""

    max_thinking: int = -1
    min_thinking: int = 0
    num_ignore: int = 1
    end: str = ""
    wait: str = "Wait"

    def __post_init__(self) -> None:
        if self.max_thinking < -1 or self.min_thinking < 0 or self.num_ignore < 0:
            raise ConfigError(
                f"budget:max_thinking={self.max_thinking} must be at least -1 (no limit), min_thinking="
                f"{self.min_thinking} and num_ignore={self.num_ignore} at least 0"
            )
        if 0 <= self.max_thinking < self.min_thinking:
            raise ConfigError(
                f"budget:max_thinking={self.max_thinking} is less than min_thinking={self.min_thinking}: raise the one "
                "or lower the other"
            )
        if self.num_ignore and not self.wait:
            raise ConfigError(
                "budget:num_ignore needs a text 'wait' to count ends by; set num_ignore=0 to rule ends out"
            )


class Budget(NamedTuple):
    """The state. ``forcing``: the end is being forced. ``pending``: tokens that must follow. ``ignored``: ends that
    were."""

    params: ProcessorParams
    thought: Thought
    forcing: bool = False
    pending: tuple[int, ...] = ()
    ignored: int = 0


class BudgetProcessor(Processor):
    """The processor."""

    forces = True

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def prepare(self, encode, thinking):
        if thinking is None:
            raise ConfigError(
                "budget must know how the model marks its thinking, and no reasoning parser fits this model; "
                "--reasoning-parser names one"
            )
        before, mark, after = self.config.end.partition(thinking.end_text)
        if not mark:  # the text comes after the mark
            before, after = "", self.config.end
        first = tuple(encode(before)) if before else ()
        if len(first) > self._limit:
            raise ConfigError(
                f"budget:end has {len(first)} tokens before the end mark, more than max_thinking={self._limit} allows"
            )
        wait = tuple(encode(self.config.wait)) if self.config.wait else ()
        return {"first": first, "last": tuple(encode(after)) if after else (), "wait": wait}

    @property
    def _limit(self) -> int:
        return NO_LIMIT if self.config.max_thinking < 0 else self.config.max_thinking

    def state(self, prompt, params) -> Any:
        return self._bounded(Budget(params, begin(params.thinking)))

    def advance(self, state: Budget, tokens):
        for token in tokens:
            state = self._after(state, token)
        return state

    def _after(self, state: Budget, token: int) -> Budget:
        if state.thought.phase == "after":  # ANSWER, or the text after the mark
            return state._replace(pending=state.pending[1:]) if state.pending else state
        wait = state.params.ids["wait"]
        ignored = bool(wait) and token == wait[0] and self._ignores(state)
        state = state._replace(
            thought=follow(state.params.thinking, state.thought, (token,)), pending=state.pending[1:]
        )
        if ignored:
            state = state._replace(pending=wait[1:], ignored=state.ignored + 1)
        return self._bounded(state)

    def _bounded(self, state: Budget) -> Budget:
        """THINK becomes FORCE where the text that ends the thinking must begin now."""
        ids, thought = state.params.ids, state.thought
        if state.forcing or state.pending or thought.phase != "inside":
            return state
        if thought.length + len(ids["first"]) < self._limit:
            return state
        # The rest of a mark that has begun is forced; a text before it would cut it in two.
        mark = state.params.thinking.end
        text = mark[thought.closing :] if thought.closing else (*ids["first"], *mark)
        return state._replace(forcing=True, pending=(*text, *ids["last"]))

    def _ignores(self, state: Budget) -> bool:
        """Whether an end that the model draws now is ignored."""
        thought, config = state.thought, self.config
        if state.forcing or state.pending or thought.phase != "inside" or thought.closing:
            return False
        if thought.length >= config.min_thinking and state.ignored >= config.num_ignore:
            return False
        return thought.length + len(state.params.ids["wait"]) + len(state.params.ids["first"]) <= self._limit

    def force(self, state, path) -> int | None:
        pending = self.advance(state, path).pending
        return pending[0] if pending else None

    def instead(self, state, path) -> tuple[int, int] | None:
        state = self.advance(state, path)
        if not self._ignores(state):
            return None
        wait = state.params.ids["wait"]
        return state.params.thinking.end[0], wait[0] if wait else -1

    def over(self, state) -> bool:
        return state.thought.phase == "after" and not state.pending
