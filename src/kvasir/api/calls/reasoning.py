"""Parsers that split a model's thinking from its answer: ``<think>...</think>`` becomes ``reasoning_content``,
streamed.

A parser reads the answer's text in pieces of any size and gives the same two texts for any cut. Where the thinking
starts depends on the prompt: a template may open it (the answer starts inside), close it (thinking is switched off), or
leave it to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvasir import technique
from kvasir.api.calls import call_openings
from kvasir.api.calls.growing import Growing
from kvasir.models.tokenizer import Tokenizer
from kvasir.technique import Technique

PACKAGE = "kvasir.api.calls.reasoning_parsers"


class ReasoningDelta(NamedTuple):
    reasoning: str
    content: str


class ReasoningParser(Technique):
    """A parser of one answer. ``prompt``: the end of the prompt's text, special tokens included; None: it is not known.

    The line breaks that models put around the marks belong to neither text. ``marks``: texts that a chat template of
    this format holds besides ``start`` or ``end`` (``auto``). ``shown``: further special tokens that the parser reads.
    ``breaks``: beginnings of a call, which end the thinking when ``end`` is missing; an ``end`` right after the call is
    dropped. ``also``: other names. ``switch``: a special token without which, in the prompt, the model need not think.
    """

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    starts_inside: ClassVar[bool] = False  # whether an answer to an unknown prompt begins inside the thinking
    marks: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()
    breaks: ClassVar[Growing] = Growing(*call_openings.ALL)
    also: ClassVar[tuple[str, ...]] = ()
    switch: ClassVar[str | None] = None

    def __init__(self, prompt: str | None = None) -> None:
        super().__init__()
        tail = (prompt or "").rstrip()
        inside = tail.endswith(self.start) or (prompt is None and self.starts_inside)
        self.opened = inside  # the prompt ends inside the thinking
        self.disabled = tail.endswith(self.end)
        self.optional = False  # whether the model may answer without thinking
        self._tried = 0  # characters of the held text at which no call begins, whatever follows
        self._mode = "content" if self.disabled else "inside" if inside else "before"
        self._may_repeat = inside  # some models repeat the mark that the prompt ended with
        self._held = ""
        self._broken = False  # a call ended the thinking, and ``end`` may follow it
        self._tail = ""  # the end of the content, without white space, while it may
        self._fresh = True  # nothing of the present text was given out yet, so line breaks at its start are dropped

    def end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids after which a grammar starts (``Grammar.after``); empty when this answer need not think."""
        return () if self.optional else self.thought_ids(tokenizer)

    def thought_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids that end the thinking; empty when this answer cannot think."""
        return () if self.disabled else tuple(tokenizer.encode(self.end, add_special=False, parse_special=True))

    def push(self, text: str, final: bool = False) -> list[ReasoningDelta]:
        """Take text; return what it adds to reasoning and content, in order; within a delta the reasoning comes first.
        ``final``: no more text comes, nothing is held back."""
        self._held += text
        reasoning = content = ""
        if self._mode == "before":
            self._open(final)
        if self._mode == "inside":
            reasoning = self._think(final)
        if self._mode == "content":
            content = self._after_break(final) if self._broken else self._take(self._held)
            self._held = "" if not self._broken else self._held
        return [ReasoningDelta(reasoning, content)]

    def _open(self, final: bool) -> None:
        """Find out, at the start of an answer, whether the model opens its thinking."""
        text = self._held.lstrip()
        if text.startswith(self.start):
            self._mode, self._held = "inside", text[len(self.start) :]
        elif final or not self.start.startswith(text):
            self._mode = "content"
            self._fresh = False  # an answer without thinking is given out as it is

    def _think(self, final: bool) -> str:
        if self._may_repeat:
            text = self._held.lstrip()
            if not final and len(text) < len(self.start) and self.start.startswith(text):
                return ""
            self._held = text.removeprefix(self.start) if text.startswith(self.start) else self._held
            self._may_repeat = False
        end, call = self._held.find(self.end), self.breaks.search(self._held, self._tried)
        if max(end, call) >= 0:
            self._broken = end < 0 or 0 <= call < end
            at = call if self._broken else end
            thought, self._held = self._held[:at], self._held[at if self._broken else at + len(self.end) :]
            self._mode = "content"
            thought = self._take(thought.rstrip("\n"))
            self._fresh = True
            return thought
        keep = 0 if final else len(self._held) - len(self._settled())
        thought = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._tried -= min(self._tried, len(thought))
        return self._take(thought.rstrip("\n") if final else thought)

    def _settled(self) -> str:
        """The held text without a suffix that may belong to a mark: line breaks, the beginning of ``</think>`` or of a
        call."""
        marks = range(min(len(self.end) - 1, len(self._held)), 0, -1)
        part = next((n for n in marks if self._held.endswith(self.end[:n])), 0)
        self._tried = self.breaks.pending(self._held, self._tried)
        return self._held[: min(len(self._held) - part, self._tried)].rstrip("\n")

    def _after_break(self, final: bool) -> str:
        """Content behind a call within the thinking, without an ``end`` that follows a closing mark."""
        out = ""
        while (at := self._held.find(self.end)) >= 0 and self._broken:
            before, self._held = self._held[:at], self._held[at + len(self.end) :]
            ends = (self._tail + before.rstrip())[-16:].endswith((">", "]", "}", "`"))
            self._broken = not ends
            out += before if ends else before + self.end
            self._tail = (self._tail + out.rstrip())[-16:]
        keep = 0
        if not final and self._broken:
            keep = next((n for n in range(len(self.end) - 1, 0, -1) if self._held.endswith(self.end[:n])), 0)
        settled = self._held[: len(self._held) - keep]
        self._held = self._held[len(settled) :]
        self._tail = (self._tail + settled).rstrip()[-16:]
        return self._take(out + settled)

    def _take(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


def choose(name: str, tokenizer: Tokenizer) -> type[ReasoningParser] | None:
    """The parser class for ``--reasoning-parser NAME``, or None when the model does not think or ``none`` was asked
    for.

    ``auto`` looks at the chat template: it must hold ``start`` or ``end``, and one of ``marks`` if it has such.
    The format with most marks there is chosen. Raises ConfigError for an unknown name.
    """
    if name == "none":
        return None
    if name != "auto":
        return technique.find_also(PACKAGE, name, ReasoningParser)
    template = tokenizer.templates.get("default")
    literals = template.literals if template else ""
    found = {
        cls: sum(mark in literals for mark in cls.marks)
        for cls in technique.of_all(PACKAGE, lambda n: technique.find(PACKAGE, n, ReasoningParser)[0])
        if cls.start in literals or cls.end in literals
    }
    fits = [cls for cls, count in found.items() if count or not cls.marks]
    return max(fits, key=lambda cls: found[cls], default=None)


def parser(
    cls: type[ReasoningParser] | None, tokenizer: Tokenizer, prompt_ids: Sequence[int] | None = None
) -> ReasoningParser | None:
    """A parser for one answer to this prompt, or None when this model's answers need none."""
    if cls is None:
        return None
    if prompt_ids is None:
        return cls()
    made = cls(tokenizer.decode(prompt_ids[-16:], skip_special=False))
    made.optional = cls.switch is not None and tokenizer.token_to_id(cls.switch) not in prompt_ids
    return made
