"""Tool calls that stand between marks within content: what the parsers of such formats share.

``MarkedCalls`` finds the marks and keeps what is read of a call until it is certain; a ``CallReader`` of the format
reads one call, or a list of them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol

from kvasir.api.calls.call_openings import OBJECTS
from kvasir.api.calls.growing import SPACE, Growing, spelled
from kvasir.api.calls.json_scan import WHITESPACE, Malformed, ValueScan
from kvasir.api.calls.tools import NAME, CallDelta, ToolParser

BRACKETS = (r"[}\]]", r"[}\]\s]{0,60}")  # those that close a call whose last string has no end
FENCE = ("`{0,3}", SPACE)  # the end of a code fence, perhaps
# A call as a JSON object without a mark before it: brackets and a separator may stand there.
NEXT_OBJECTS = [[*before, *begun] for begun in OBJECTS for before in ([], [*BRACKETS, "[,;]?", SPACE])]


def restarts(closes: Sequence[str], *opens: Sequence[str], fenced: bool = False) -> Growing:
    """Return the pattern of another call that begins within the text of a call, with the brackets and the mark that
    close the call before it. ``opens``: each way in which a call of the format begins, in parts. ``fenced``: a code
    fence may end before that mark."""
    closings = [[], *([*FENCE * fenced, *spelled(mark), SPACE] for mark in closes)]
    before = [[*brackets, *closing] for closing in closings for brackets in ([], BRACKETS)]
    # Brackets twice in a row mean the same as once, and trying how to share them takes long.
    ways = ([*closing, *begun] for closing in before for begun in opens)
    return Growing(*(way for way in ways if way[:4] != [*BRACKETS, *BRACKETS]))


@cache
def closing(closes: Sequence[str], fenced: bool = False) -> Growing:
    """Return the pattern of the brackets and the mark that close a call, at the end of an answer."""
    return Growing(
        *([*brackets, *FENCE * fenced, *spelled(mark), SPACE] for mark in closes for brackets in ([], BRACKETS))
    )


class CallReader(Protocol):
    """A reader of the calls behind one mark. ``opened``: a call was announced and has not ended. ``done``: the calls
    have ended; white space and a closing mark may follow."""

    opened: bool
    done: bool
    over: str = ""  # text behind the calls that was read already
    inside: bool = False  # the next character may be any: it belongs to a string, for example
    restarts: Growing | None = None  # those of ``MarkedCalls``, if they differ for what this reader reads

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

    ``closes``: marks one of which may follow a call; it is dropped. ``restarts``: how another call begins within a text
    that has no end, for example a string whose quote is missing; None: a reader notices that by itself. ``fenced``: a
    code fence may stand around the calls between the marks.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()
    restarts: ClassVar[Growing | None] = None
    fenced: ClassVar[bool] = False

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(schemas)
        self._reader: CallReader | None = None
        self._raw = ""  # text of the calls being read that no announced call holds: content if they are malformed
        self._num_certain = 0  # characters of ``_raw`` up to the end of its mark; behind it other calls may begin
        self._mark = ""  # the part of a mark that was read
        self._space = ""  # white space before the mark: content only if content follows
        self._watched = ""  # text within a call that may begin another one, and is held from the reader
        self._again = ""  # text to read again, before what follows
        self._after_call = False  # only white space and a closing mark have come since a call
        self._closed = False  # the closing mark of the last call has come
        self._begun = False  # something other than white space has come
        marks = (*self.awaited(), *self.opens, *self.closes)
        firsts = re.escape("".join(sorted({mark[0] for mark in marks})))
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
        self._out = []
        self._read(text)
        if final:
            self.finish()
        return self._out

    def feed(self, char: str) -> None:
        self._read(char)

    def finish(self) -> None:
        while self._reader is not None:
            watched, self._watched = self._watched, ""
            if not (self._reader.opened and closing(self.closes, self.fenced).match(watched)):
                for i, char in enumerate(watched):
                    if self._reader is None:
                        self._again += watched[i:]
                        break
                    self._in_call(self._reader, char)
            if self._reader is not None and not self._again:
                self._break_off(self._reader)
            again, self._again = self._again, ""
            self._read(again)
        if self._mark in self.awaited():
            self._marked()
        elif self._mark and any(mark.startswith(self._mark) for mark in self.opens):
            self._plain(self._mark)
        elif not self._after_call or self._space.strip(WHITESPACE):
            self.say(self._space)
        self._mark = self._space = ""

    def _read(self, text: str) -> None:
        """Read text, and at once what of it has to be read again."""
        at, outer = 0, []
        while at < len(text) or outer:
            if at == len(text):
                text, at = outer.pop()
                continue
            at = self._step(text, at)
            if self._again:
                outer.append((text, at))
                text, at, self._again = self._again, 0, ""

    def _step(self, text: str, at: int) -> int:
        """Read some of the text from ``at`` on; return where it ends."""
        if self._reader is not None:
            taken = at if self._watched else self._reader.take(text, at)
            if taken == at:
                self._watch(self._reader, text[at])
            return max(taken, at + 1)
        if not self._mark and not self._after_call and (quiet := self._quiet.match(text, at)):
            self._plain(quiet[0])
            return quiet.end()
        self._outside(text[at])
        return at + 1

    def _outside(self, char: str) -> None:
        """Read a character that belongs to no call, as far as we know."""
        if any(mark.startswith(self._mark + char) for mark in self.awaited()):
            self._mark += char
            if [mark for mark in self.awaited() if mark.startswith(self._mark)] == [self._mark]:
                self._marked()
        elif self._mark in self.awaited():  # a longer mark begins with it, and has not come
            self._marked()
            self._again = char
        elif self._mark:
            self._again = self._mark[1:] + char
            self._plain(self._mark[0])
        elif char in WHITESPACE:
            self._space += char
        else:
            self._plain(char)

    def _marked(self) -> None:
        self._begun = True
        if self._mark not in self.closes:
            self._reader = self.reader(self._mark)
            self._raw = self._space + self._mark
            self._num_certain = len(self._raw)
        self._closed = self._reader is None
        self._mark = self._space = ""

    def _plain(self, text: str) -> None:
        self.say(text if self._after_call else self._space + text)
        self._mark = self._space = ""
        self._after_call, self._begun = False, True

    def _watch(self, reader: CallReader, char: str) -> None:
        """Hold text within a call from its reader while it may begin another call."""
        restarts = reader.restarts or self.restarts
        if restarts is None or not (self._watched or (char in restarts.firsts and reader.inside)):
            self._in_call(reader, char)
            return
        self._watched += char
        may = restarts.may(self._watched)
        found = restarts.match(self._watched) if may else None
        if found and self._offers(found):
            watched, self._watched = self._watched, ""
            if reader.opened:  # the brackets and the mark before it close the call
                found_at = [at for mark in self.opens if (at := watched.find(mark)) >= 0]
                watched = watched[min(found_at) if found_at else watched.find("{") :]
            self._again = watched
            self._break_off(reader)
        elif found or not may:
            watched, self._watched = self._watched, ""
            self._release(reader, watched)

    def _release(self, reader: CallReader, held: str) -> None:
        """Give the reader held text up to the next place where another call may begin, and hold the text from there.
        Each place is tried once with all of the text: reading that again by characters would try it for each."""
        while held and self._reader is reader:
            char, held = held[0], held[1:]
            self._again = held
            self._in_call(reader, char)
            restarts = reader.restarts or self.restarts
            if self._again != held or restarts is None:
                return  # the reader gave some text back, and all is read again
            if held and held[0] in restarts.firsts and reader.inside:
                if restarts.starts(held):
                    return
                if restarts.may(held):
                    self._watched, self._again = held, ""
                    return

    def _offers(self, found: re.Match[str]) -> bool:
        """Whether the pattern holds no name of a function that is not offered."""
        name = found.groupdict().get("name")
        return name is None or self.names is None or name in self.names

    def _in_call(self, reader: CallReader, char: str) -> None:
        opened, num_calls = reader.opened, self.num_calls
        try:
            reader.feed(char)
        except Malformed:
            self._again = char + self._again
            self._raw = "" if self.num_calls > num_calls else self._raw
            if reader.opened:
                left = self.end_call() + reader.rest()
                self._again, self._reader, self._raw = left + self._again, None, ""
                self._after_call = not left
            else:
                self._give_up()
            return
        self._raw = "" if opened or reader.opened or self.num_calls > num_calls else self._raw + char
        self._num_certain = min(self._num_certain, len(self._raw))
        if reader.done:
            self._reader, self._raw, self._after_call = None, "", True
            if left := reader.rest():
                self._plain(left)
                self._after_call = True
            self._again = reader.over + self._again

    def _break_off(self, reader: CallReader) -> None:
        """End the call that is being read where nothing of it follows."""
        if not reader.opened and not reader.completes():
            self._give_up()
            return
        left = reader.end() if reader.opened else ""
        left = self.end_call() + left if reader.opened else left
        self._reader, self._raw, self._after_call = None, "", not left
        self.say(left)

    def _give_up(self) -> None:
        """Take what was read since the last announced call as content, in which other calls may begin."""
        raw, self._raw, self._reader = self._raw, "", None
        self._after_call = not raw.strip()  # white space behind the last call of a list
        if not self._after_call:
            again = raw[self._num_certain :].lstrip(WHITESPACE)
            self.say(raw.removesuffix(again))
            self._again = again + self._again


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

    def skip(self, text: str, start: int, more: str = "") -> int:
        """Return the end of the text from ``start`` on in which no mark begins, and none of the characters ``more``."""
        if self._held:
            return start
        found = [at for first in {*more, *(m[0] for m in self._marks)} if (at := text.find(first, start)) >= 0]
        return min(found, default=len(text))


class NameScan:
    """A reader of a function's name. ``strict``: only offered names are one, where they are known. ``quotes``: one of
    these characters may stand before the name and behind it."""

    def __init__(self, parser: ToolParser, strict: bool = False, quotes: str = "") -> None:
        self._offered = parser.names if strict else None
        self._quotes = quotes
        self._before = self._behind = False  # a quote has come there
        self.name = ""

    def feed(self, char: str) -> bool:
        """Read one character; return False when it ends the name. Raises Malformed when there is no name, or not an
        offered one."""
        if not self.name and char in WHITESPACE:
            return True
        if NAME.fullmatch(self.name + char) and not self._behind:
            self.name += char
            return True
        if char in self._quotes and not (self._behind if self.name else self._before):
            self._before, self._behind = True, bool(self.name)
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

    @property
    def inside(self) -> bool:
        """Whether the next character belongs to a string or ends it."""
        return self._scan.in_string

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
