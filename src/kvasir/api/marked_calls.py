"""Tool calls that stand between marks within content: what the parsers of such formats share.

``MarkedCalls`` finds the marks and keeps what is read of a call until it is certain; a ``CallReader`` of the format
reads one call, or a list of them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from kvasir.api.json_scan import WHITESPACE, Malformed, ValueScan
from kvasir.api.tools import NAME, CallDelta, ToolParser


class CallReader(Protocol):
    """A reader of the calls behind one mark. ``opened``: a call was announced and has not ended. ``done``: the calls
    have ended; white space and a closing mark may follow."""

    opened: bool
    done: bool
    over: str = ""  # text behind the calls that was read already

    def feed(self, char: str) -> None:
        """Read one character. Raises Malformed when it cannot continue a call."""

    def end(self) -> str:
        """Read the end of the answer; return text that was read behind the call's start and is no part of it."""
        return ""

    def completes(self) -> bool:
        """Whether the end of the answer makes what was read a call, which is then announced."""
        return False

    def rest(self) -> str:
        """Text that is no part of the call, when the character fed last could not continue it."""
        return ""

    def take(self, text: str, start: int) -> int:
        """Read ahead of ``feed`` what needs no look at each character, of an announced call; return where it ends."""
        return start


class MarkedCalls(ToolParser):
    """A parser of calls that begin with one of ``opens``. White space around them belongs to the format.

    ``closes``: marks one of which may follow a call; it is dropped.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._reader: CallReader | None = None
        self._raw = ""  # text of the calls being read that no announced call holds: content if they are malformed
        self._mark = ""  # the part of a mark that was read
        self._space = ""  # white space before the mark: content only if content follows
        self._after_call = False  # only white space and a closing mark have come since a call
        self._closed = False  # the closing mark of the last call has come
        self._begun = False  # something other than white space has come
        firsts = re.escape("".join(sorted({mark[0] for mark in (*self.awaited(), *self.opens, *self.closes)})))
        # Text in which no mark begins, up to white space that a mark may follow.
        self._quiet = re.compile(rf"(?:[^{firsts} \t\n\r]+|[ \t\n\r]+(?=[^{firsts} \t\n\r]))+")

    @abstractmethod
    def reader(self, mark: str) -> CallReader:
        """Return a reader of the calls that ``mark`` opens."""
        raise NotImplementedError

    def awaited(self) -> Sequence[str]:
        """The marks that may come next."""
        return (*self.opens, *self.closes) if self._after_call and not self._closed else self.opens

    def push(self, text: str, final: bool = False) -> list[str | CallDelta]:
        self._out, at = [], 0
        while at < len(text):
            before = at
            if self._reader is not None:
                at = self._reader.take(text, at)
            elif not self._mark and not self._after_call and (quiet := self._quiet.match(text, at)):
                self._plain(quiet[0])
                at = quiet.end()
            if at == before:
                self.feed(text[at])
                at += 1
        if final:
            self.finish()
        return self._out

    def feed(self, char: str) -> None:
        if self._reader is not None:
            self._in_call(self._reader, char)
        elif any(mark.startswith(self._mark + char) for mark in self.awaited()):
            self._mark += char
            if self._mark in self.awaited():
                self._marked()
        elif self._mark:
            self._plain(self._mark)
            self.feed(char)
        elif char in WHITESPACE:
            self._space += char
        else:
            self._plain(char)

    def _marked(self) -> None:
        self._begun = True
        if self._mark in self.opens:
            self._reader = self.reader(self._mark)
            self._raw = self._space + self._mark
        self._closed = self._reader is None
        self._mark = self._space = ""

    def _plain(self, text: str) -> None:
        self.say(text if self._after_call else self._space + text)
        self._mark = self._space = ""
        self._after_call, self._begun = False, True

    def _in_call(self, reader: CallReader, char: str) -> None:
        opened, num_calls = reader.opened, self.num_calls
        try:
            reader.feed(char)
        except Malformed:
            # After an announced call only the rest is content, otherwise everything read.
            self._after_call = not reader.opened and not self._raw.strip()  # the calls had ended
            text = self.end_call() + reader.rest() if reader.opened else self._raw
            opened = reader.opened
            last = max(text.rfind(mark[0], not reader.opened) for mark in self.opens)
            if last >= 0 and any(mark.startswith(text[last:] + char) for mark in self.opens):
                text, self._mark = text[:last], text[last:]  # a mark was read as part of the call
            self._after_call |= opened and not text
            self.say("" if self._after_call else text)
            self._reader, self._raw = None, ""
            self.feed(char)
            return
        self._raw = "" if opened or reader.opened or self.num_calls > num_calls else self._raw + char
        if reader.done:
            self._reader, self._raw, self._after_call = None, "", True
            if left := reader.rest():
                self._plain(left)
                self._after_call = True
            for char in reader.over:
                self.feed(char)

    def finish(self) -> None:
        if self._reader is not None:
            if not self._reader.opened and self._reader.completes():
                self._raw = ""
            text = self._reader.end() if self._reader.opened else ""
            if self._raw.strip() or not self._reader.opened:
                self.say(self._raw if self._raw.strip() and not text else text)
            else:
                self.say(self.end_call() + text)
        elif self._mark and any(mark.startswith(self._mark) for mark in self.opens):
            self._plain(self._mark)
        elif not self._after_call:
            self.say(self._space)
        self._reader, self._raw, self._mark, self._space = None, "", "", ""


# ------------------------------------------------------------------------------------------- what readers are made of


class OneOf:
    """A matcher of one of several texts, after any white space. No text may be the beginning of another one."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._read = ""

    def feed(self, char: str) -> str | None:
        """Read one character; return the text that it completes. Raises Malformed."""
        if not self._read and char in WHITESPACE:
            return None
        self._read += char
        if self._read in self._texts:
            return self._read
        if not any(text.startswith(self._read) for text in self._texts):
            raise Malformed
        return None


class Until:
    """A reader of text up to the first of several marks, which it does not give out."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self.mark = ""  # the mark that was found
        self._held = ""  # the beginning of a mark, perhaps

    def feed(self, char: str) -> tuple[str, bool]:
        """Read one character; return the text that it makes certain, and whether a mark is complete."""
        self._held += char
        if self._held in self._marks:
            self.mark, self._held = self._held, ""
            return "", True
        start = next(i for i in range(len(self._held) + 1) if any(m.startswith(self._held[i:]) for m in self._marks))
        text, self._held = self._held[:start], self._held[start:]
        return text, False

    def skip(self, text: str, start: int) -> int:
        """Return the end of the text from ``start`` on in which no mark begins."""
        if self._held:
            return start
        found = [at for first in {mark[0] for mark in self._marks} if (at := text.find(first, start)) >= 0]
        return min(found, default=len(text))


class NameScan:
    """A reader of a function's name. ``strict``: only offered names are one, where they are known."""

    def __init__(self, parser: ToolParser, strict: bool = False) -> None:
        self._offered = parser.names if strict else None
        self.name = ""

    def feed(self, char: str) -> bool:
        """Read one character; return False when it ends the name. Raises Malformed when there is no name, or not an
        offered one."""
        if not self.name and char in WHITESPACE:
            return True
        if NAME.fullmatch(self.name + char):
            self.name += char
            return True
        if not self.name or (self._offered is not None and self.name not in self._offered):
            raise Malformed
        return False


class ObjectArguments:
    """A reader of a call's arguments that are a JSON object; they are announced and stream as they are read."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._scan = ValueScan(lenient=True)
        self.opened = self.done = False

    def feed(self, char: str) -> None:
        """Read one character. Raises Malformed."""
        if not self.opened:
            if char in WHITESPACE:
                return
            if char != "{":
                raise Malformed
            self._scan.feed(char)
            self._parser.open_call(self._name)
            self.opened = True
        else:
            self._scan.feed(char)
        self._parser.argue(char)
        if self._scan.done:
            self.opened, self.done = False, True
