"""Read JSON one character at a time: the first character that cannot be JSON raises, and no text is read twice.

``pydantic_core.from_json(allow_partial=...)`` does not replace this module. It returns values and not their place in
the text, so arguments could not be streamed as the model wrote them. It lets the last of two equal keys win unseen,
accepts some text that no JSON starts with (``[0t``, ``{"a": 1]``), refuses the escape of a lone surrogate, and has to
read the whole text again for each piece.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

WHITESPACE = " \t\n\r"
MAX_DEPTH = 256
LITERAL_STARTS = {"t": "true", "f": "false", "n": "null"}
# State of a number -> kind of the next character -> next state. A number may end in a state of ``NUMBER_ENDS``.
NUMBER = {
    "-": {"0": "zero", "d": "int"},
    "zero": {".": "dot", "e": "exp"},
    "int": {"0": "int", "d": "int", ".": "dot", "e": "exp"},
    "dot": {"0": "frac", "d": "frac"},
    "frac": {"0": "frac", "d": "frac", "e": "exp"},
    "exp": {"0": "power", "d": "power", "s": "sign"},
    "sign": {"0": "power", "d": "power"},
    "power": {"0": "power", "d": "power"},
}
NUMBER_ENDS = {"zero", "int", "frac", "power"}
# Kind of each character that a number may hold: zero, another digit, point, exponent mark or sign.
NUMBER_KINDS = (
    {"0": "0", ".": "."} | dict.fromkeys("123456789", "d") | dict.fromkeys("eE", "e") | dict.fromkeys("+-", "s")
)


class Malformed(Exception):
    """The text cannot be continued to the JSON value or the tool call that it began."""


class ValueScan:
    """A scanner of one JSON value. ``done`` is set when the value is complete."""

    def __init__(self, lenient: bool = False) -> None:
        self.done = False
        # Allow control characters and backslashes that escape nothing in strings; ``ObjectRepair`` escapes them.
        self._lenient = lenient
        self._stack: list[str] = []  # open brackets, innermost last
        # value, string, escape, u1-u4, literal, number, after, key, colon, first_key or first_value
        self._state = "value"
        self._string_is_key = False
        self._rest = ""  # what a literal still lacks
        self._number = ""  # state of the number, a key of ``NUMBER``

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string or ends it."""
        return self._state == "string"

    def feed(self, char: str) -> bool:
        """Take one character; return False when it ends a number without being part of the value.

        Raises Malformed when ``char`` cannot come here.
        """
        if self._state == "string":
            self._in_string(char)
        elif self._state == "number":
            return self._in_number(char)
        elif self._state in ("escape", "u1", "u2", "u3", "u4"):
            self._in_escape(char)
        elif self._state == "literal":
            self._in_literal(char)
        elif char in WHITESPACE:
            pass
        else:
            self._between(char)
        return True

    def _between(self, char: str) -> None:
        state = self._state
        if state == "colon" and char == ":":
            self._state = "value"
        elif state in ("key", "first_key") and char == '"':
            self._state, self._string_is_key = "string", True
        elif (state == "first_key" and char == "}") or (state == "first_value" and char == "]"):
            self._pop()
        elif state == "after":
            self._after(char)
        elif state in ("value", "first_value"):
            self._start(char)
        else:
            raise Malformed

    def _start(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                raise Malformed
            self._stack.append(char)
            self._state = "first_key" if char == "{" else "first_value"
        elif char == '"':
            self._state, self._string_is_key = "string", False
        elif char in LITERAL_STARTS:
            self._state, self._rest = "literal", LITERAL_STARTS[char][1:]
        elif char == "-" or char in "0123456789":
            self._state, self._number = "number", {"-": "-", "0": "zero"}.get(char, "int")
        else:
            raise Malformed

    def _after(self, char: str) -> None:
        if char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif char == {"{": "}", "[": "]"}[self._stack[-1]]:
            self._pop()
        else:
            raise Malformed

    def _pop(self) -> None:
        self._stack.pop()
        self._ended()

    def _ended(self) -> None:
        self._state = "after"
        self.done = not self._stack

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = "escape"
        elif char < " " and not self._lenient:
            raise Malformed
        elif char == '"' and self._string_is_key:
            self._state = "colon"
        elif char == '"':
            self._ended()

    def escapes(self, char: str) -> bool:
        """Whether an escape that is being read can go on with this character."""
        return char in ('"\\/bfnrtu' if self._state == "escape" else "0123456789abcdefABCDEF")

    def end_escape(self) -> None:
        """Take what was read of an escape as text."""
        self._state = "string"

    @property
    def escape_length(self) -> int:
        """Number of characters read of an escape that is not complete; 0 outside of one."""
        return {"escape": 1, "u1": 2, "u2": 3, "u3": 4, "u4": 5}.get(self._state, 0)

    def _in_escape(self, char: str) -> None:
        if self.escapes(char):
            following = {
                "escape": "u1" if char == "u" else "string",
                "u1": "u2",
                "u2": "u3",
                "u3": "u4",
                "u4": "string",
            }
            self._state = following[self._state]
        elif self._lenient:
            self.end_escape()
            self._in_string(char)
        else:
            raise Malformed

    def _in_literal(self, char: str) -> None:
        if not self._rest.startswith(char):
            raise Malformed
        self._rest = self._rest[1:]
        if not self._rest:
            self._ended()

    def _in_number(self, char: str) -> bool:
        following = NUMBER[self._number].get(NUMBER_KINDS.get(char, ""))
        if following is not None:
            self._number = following
            return True
        if self._number not in NUMBER_ENDS:
            raise Malformed
        self._ended()
        if self._stack:
            return self.feed(char)
        return False


class ObjectScan:
    """A scanner of one JSON object that reports where the values of its top-level keys start and end.

    ``key``: the key whose value is being read. ``text``: that value so far if it is a string, else its first character.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.text = ""
        self._keys: list[str] = []
        self._state = "open"  # open, first_key, key, in_key, colon, before, value, after or done
        self._scan = ValueScan()

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string or ends it."""
        return self._state in ("in_key", "value") and self._scan.in_string

    def seen(self, keys: Collection[str]) -> int:
        """Number of top-level keys read so far that are among ``keys``, repeated ones counted each time."""
        return sum(k in keys for k in self._keys)

    def value(self) -> Any:
        """The value that was just completed if it is a string, else None."""
        return json.loads(self.text) if self.text.startswith('"') else None

    def feed(self, char: str) -> str | None:
        """Take one character and say what it is.

        Returns "start", "part" or "value" (the last one) for a character of the value of ``key``, "end" for the closing
        brace, else None. Raises Malformed when ``char`` cannot come here.
        """
        if self._state == "value":
            return self._in_value(char)
        if self._state == "in_key":
            self._in_key(char)
            return None
        if self._state == "done":
            raise Malformed
        if char in WHITESPACE and self._state != "open":
            return None
        return self._between(char)

    def _between(self, char: str) -> str | None:
        state = self._state
        if state == "open" and char == "{":
            self._state = "first_key"
        elif state in ("first_key", "key") and char == '"':
            self._state, self._scan, self.text = "in_key", ValueScan(), char
            self._scan.feed(char)
        elif state in ("first_key", "after") and char == "}":
            self._state, self.key = "done", None
            return "end"
        elif state == "colon" and char == ":":
            self._state = "before"
        elif state == "after" and char == ",":
            self._state, self.key = "key", None
        elif state == "before":
            return self._start_value(char)
        else:
            raise Malformed
        return None

    def _in_key(self, char: str) -> None:
        self._scan.feed(char)
        self.text += char
        if self._scan.done:
            self.key = json.loads(self.text)
            self._keys.append(self.key)
            self._state = "colon"

    def _start_value(self, char: str) -> str:
        self._scan, self._state, self.text = ValueScan(lenient=char == "{"), "value", char
        self._scan.feed(char)
        return "start"

    def _in_value(self, char: str) -> str | None:
        if not self._scan.feed(char):  # the value was a number, which ends with the character after it
            self._state = "after"
            return None if char in WHITESPACE else self._between(char)
        if self.text.startswith('"'):
            self.text += char
        if self._scan.done:
            self._state = "after"
            return "value"
        return "part"


class ObjectRepair:
    """A writer of one JSON object that can end at any point: what it gives out plus ``close()`` is valid JSON.

    Control characters in strings and backslashes that escape nothing are escaped. A comma, a key, and a value that is
    neither a string nor a bracket are held back until the value is complete. ``held``: that text as it came.
    """

    def __init__(self) -> None:
        self._scan = ValueScan()
        self._ready = ""
        self.held = ""

    def feed(self, char: str) -> str:
        """Take one character; return the text that became certain. Raises Malformed."""
        scan = self._scan
        was_number = scan._state == "number"
        if (length := scan.escape_length) and not scan.escapes(char):
            self._ready = f"{self._ready[:-length]}\\{self._ready[-length:]}"
            scan.end_escape()
        if scan._state == "string" and char < " ":
            self._ready += json.dumps(char)[1:-1]
        else:
            scan.feed(char)
            self._ready += char
        self.held += char
        if was_number and char == ",":  # it ended the number
            out, self._ready, self.held = self._ready[:-1], char, char
            return out
        in_value = scan._state == "string" and not scan._string_is_key
        return self._give() if in_value or scan._state in ("after", "first_key", "first_value") else ""

    def _give(self) -> str:
        ready, self._ready, self.held = self._ready, "", ""
        return ready

    def close(self) -> str:
        """End the object; return the text that completes it. ``held`` keeps what could not become part of it."""
        scan, out = self._scan, ""
        if scan.done:
            return ""
        escape = scan.escape_length > 0 and not scan._string_is_key
        if escape or scan._state == "after" or (scan._state == "number" and scan._number in NUMBER_ENDS):
            out = "\\" * escape + self._give()  # the backslash of half an escape is text
        if escape or (scan._state == "string" and not scan._string_is_key):
            out += '"'
        self.held = "" if self.held.strip(WHITESPACE) in ("", ",") else self.held
        out += "".join({"{": "}", "[": "]"}[bracket] for bracket in reversed(scan._stack)) if scan._stack else "{}"
        scan.done = True
        return out
