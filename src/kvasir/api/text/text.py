"""The text side of a served model: its tokenizer, and the parsers that fit its template. Loaded in the background at
start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvasir.api.calls import reasoning, tools
from kvasir.api.text.chat import Message
from kvasir.api.text.processing import Processing
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer


class Text:
    """The tokenizer and the parsers of one model. Call ``load`` before anything else, in a thread, because it blocks.

    ``reads``: names of the variables that the chat templates read. ``keep_ids``: special tokens whose text the parsers
    look for, so they are shown although special tokens are skipped.
    """

    tokenizer: Tokenizer
    reads: frozenset[str]
    keep_ids: frozenset[int]
    tool_format: type[tools.ToolParser] | None
    processing: Processing

    def __init__(
        self,
        open_tokenizer: Callable[[], Tokenizer],
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        processors: Sequence[str] = (),
    ) -> None:
        self._open = open_tokenizer
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._processors = processors

    def load(self) -> None:
        """Load the tokenizer and choose the parsers, once, because looking for them reads the metadata of all installed
        packages. Raises ConfigError."""
        self.tokenizer = self._open()
        self._longest_token = max(len(self.tokenizer.id_to_token(i) or "") for i in range(self.tokenizer.size))
        self.reads = frozenset().union(*(template.reads for template in self.tokenizer.templates.values()))
        self.tool_format = tools.choose(self._tool_parser, self.tokenizer)
        thinking = self._thinking = reasoning.choose(self._reasoning_parser, self.tokenizer)
        self.processing = Processing(self.tokenizer, thinking, self._processors)
        marks = [
            *((*self.tool_format.marks, *self.tool_format.shown) if self.tool_format else ()),
            *((thinking.start, thinking.end, *thinking.shown) if thinking else ()),
        ]
        self.keep_ids = self.tokenizer.special_ids & {self.tokenizer.token_to_id(mark) for mark in marks}

    def check_size(self, texts: Iterable[str], max_model_len: int, contexts: int = 1) -> None:
        """Raise RequestError, before any work, for text that cannot fit
        ``contexts`` contexts however well it encodes."""
        num_chars = sum(map(len, texts))
        if num_chars > contexts * max_model_len * self._longest_token:
            room = "the context" if contexts == 1 else f"{contexts} times the context"
            raise RequestError(
                f"the prompt has {num_chars} characters, far more than {room} of {max_model_len} tokens can hold",
                param="prompt",
                code="context_length_exceeded",
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation: plain text, without added tokens."""
        return self.tokenizer.encode(text, add_special=False)

    def word(self, text: str) -> list[int]:
        """Token ids of a bad word, which may name a special token."""
        return self.tokenizer.prompt_ids(text, add_special=False)

    def reasoning(self, prompt_ids: Sequence[int], continued: str | None = None) -> reasoning.ReasoningParser | None:
        """A parser for one answer to this prompt; None when the model does not think.

        ``continued``: text of the message that the answer continues, if it does. The answer then starts in the thinking
        that this text left open, or after it.
        """
        if self._thinking is not None and continued is not None:
            start, end = self._thinking.start, self._thinking.end
            return self._thinking(start if continued.rfind(start) > continued.rfind(end) else end)
        return reasoning.parser(self._thinking, self.tokenizer, prompt_ids)

    def message(
        self,
        prompt_ids: Sequence[int],
        offered: list[dict[str, Any]] | None,
        parallel: bool,
        continued: str | None = None,
    ) -> Message:
        """A fresh assistant message that answers this prompt. ``offered``: the tools it may call. ``continued``: as in
        ``reasoning``."""
        thinking = self.reasoning(prompt_ids, continued)
        calls = tools.parser(self.tool_format, offered) if offered else None
        return Message(thinking, calls, parallel, thinking.thought_ids(self.tokenizer) if thinking else ())
