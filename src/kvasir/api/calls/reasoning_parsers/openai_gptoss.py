"""Harmony's channels: analysis is reasoning, final and commentary are content; calls pass as they are (gpt-oss)."""

from __future__ import annotations

from kvasir.api.calls.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, Header
from kvasir.api.calls.reasoning import ReasoningDelta, ReasoningParser
from kvasir.models.tokenizer import Tokenizer

ENDS = (END, CALL, RETURN, START)


class OpenAIGptOss(ReasoningParser):
    """The parser of this format. Messages of one kind are separated by a line break. A message with a recipient goes to
    the tool parser with its header and end, as content. Text that is no message is content."""

    start = CHANNEL + "analysis"
    end = END
    shown = (START, CHANNEL, CONSTRAIN, MESSAGE, CALL, RETURN)

    def __init__(self, prompt: str | None = None) -> None:
        super().__init__(prompt)
        begun = (prompt or START)[(prompt or START).rfind(START) :]  # of the message that the answer continues
        header, mark, _ = begun.partition(MESSAGE)
        self._header: Header | None = Header() if begun.startswith(START) and not mark else None
        self._kind = self._kind_of(Header(header)) if mark else "content"
        self.disabled = self._header is None and self._kind != "reasoning"
        self._begun: set[str] = set()  # kinds of which text was given out
        self._within = False  # the header began within a message for the user, so it may be text of that message
        self._tail = ""  # the end of what was given out
        self._separate = False  # text of a further message of its kind comes next
        self._out: list[ReasoningDelta] = []

    def end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        text = f"{CHANNEL}final{MESSAGE}"
        return () if self.disabled else tuple(tokenizer.encode(text, add_special=False, parse_special=True))

    def push(self, text: str, final: bool = False) -> list[ReasoningDelta]:
        self._out, at = [], 0
        while at < len(text):
            if self._header is None and not self._held:  # every mark begins with the same character
                end = text.find(START[0], at)
                end = len(text) if end < 0 else end
                self._say(text[at:end])
                at = end
                if at == len(text):
                    break
            char, at = text[at], at + 1
            if self._header is None:
                self._in_message(char)
            elif self._header.feed(char):
                self._enter(self._header)
            elif not self._header.possible:
                self._malformed(self._header)
        if final and self._header is not None and (self._within or not self._header.begun):
            self._malformed(self._header)
        if final and self._header is None:
            self._say(self._held)
            self._held = ""
        return self._out

    @staticmethod
    def _kind_of(header: Header) -> str:
        if header.calls:
            return "call"
        return "content" if header.public else "reasoning"

    def _malformed(self, header: Header) -> None:
        """Take a header that is none as text. Behind a mark, even half a one, it may be thinking, so only the channel
        final is shown, and text within a message for the user."""
        text, self._header = header.text.removesuffix(header.restart), None
        marked = text.lstrip().startswith("<|") and not self._within
        self._kind = "reasoning" if marked and header.channel != "final" else "content"
        self._separate = self._kind in self._begun and bool(header.restart) and not self._within
        self._within = False
        self._say(text.replace(START, "").replace(CHANNEL, "") if self._kind == "reasoning" else text)
        if header.restart:
            self._header = Header(START if header.restart == START else "")

    def _enter(self, header: Header) -> None:
        self._header, self._kind, self._within = None, self._kind_of(header), False
        self._separate = self._kind in self._begun
        if self._kind == "call":
            self._say(header.text)
        for char in header.body:
            self._in_message(char)

    def _in_message(self, char: str) -> None:
        self._held += char
        ends = (*ENDS, CHANNEL, MESSAGE) if self._kind == "content" else ENDS
        if self._held in ends:
            ended, self._held = self._held, ""
            if ended == MESSAGE:  # of a header whose marks before it are broken
                self._kind = "reasoning" if self._tail.endswith("analysis") else self._kind
                self._say(ended if self._kind == "content" else "")
                return
            if self._kind == "call" and ended != START:
                self._say(ended)
            self._header = Header(ended if ended in (START, CHANNEL) else "")
            self._within = ended == CHANNEL
            return
        start = next(i for i in range(len(self._held) + 1) if any(e.startswith(self._held[i:]) for e in ends))
        text, self._held = self._held[:start], self._held[start:]
        self._say(text)

    def _say(self, text: str) -> None:
        if not text:
            return
        self._tail = (self._tail + text)[-len("analysis") :]
        if self._kind != "call":
            text = "\n" * self._separate + text
            self._begun.add(self._kind)
            self._separate = False
        thought = self._kind == "reasoning"
        last = self._out[-1] if self._out else None
        if last is not None and bool(last.reasoning) == thought:
            self._out[-1] = ReasoningDelta(last.reasoning + text * thought, last.content + text * (not thought))
        else:
            self._out.append(ReasoningDelta(text, "") if thought else ReasoningDelta("", text))
