"""Harmony, the message format of gpt-oss: <|start|>role<|channel|>channel<|message|>text<|end|>, and its headers.

Source: OpenAI's page "OpenAI harmony response format". An answer is one or more messages of the assistant. Those in the
channel ``analysis`` are reasoning, those with a recipient are calls, and the others are for the user.
"""

from __future__ import annotations

import re

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ROLES = ("assistant", "user", "all", "system", "developer")  # recipients that are no tools
# How a header begins. Some models leave out <|start|> or <|channel|>.
BEGINNINGS = (CHANNEL, START, MESSAGE, "to=", "assistant" + CHANNEL, "assistant to=")
BEGINNINGS += tuple(channel + MESSAGE for channel in ("analysis", "commentary", "final"))
TO = re.compile(r"to=[\w.-]{0,128}(?: \w{0,20})? ?(?:<.*)?")  # a header, or its beginning, without a mark before it
# Words of headers besides names of recipients.
WORDS = (
    "assistant",
    "analysis",
    "commentary",
    "final",
    "constrain",
    "json",
    "code",
    "start",
    "channel",
    "message",
    "to",
)
MAX_HEADER = 300  # characters; a longer header is text that only looks like one


class Header:
    """A message's header, read character by character; it begins with ``text``. ``body``: text of the message that was
    read with a header whose <|message|> is missing."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.body = ""

    def feed(self, char: str) -> bool:
        """Read one character; return True when it ends the header."""
        self.text += char
        for begun in ("{", CALL):  # of a call: its arguments, or the end of one without arguments
            if self.text.endswith(begun) and CHANNEL in self.text and self.calls:
                self.text, self.body = self.text.removesuffix(begun) + MESSAGE, begun
        return self.text.endswith(MESSAGE)

    @property
    def possible(self) -> bool:
        """Whether the text so far may be a header."""
        text = self.text.lstrip()
        starts = any(s.startswith(text) or text.startswith(s) for s in BEGINNINGS)
        likely = not text.startswith("to=") or TO.fullmatch(text) is not None
        short = len(text) <= MAX_HEADER and text.count(CHANNEL) <= 2 and "\n" not in text
        return starts and likely and short and not self.restart

    @property
    def begun(self) -> bool:
        """Whether the text is the beginning of a header that a mark opened, and nothing else."""
        words = re.findall(r"\w+", re.sub(r"\bto(=[\w.-]*)?", "", self.text))
        marked = self.text.lstrip().startswith(START[:2])
        return marked and all(any(known.startswith(word) for known in WORDS) for word in words)

    @property
    def restart(self) -> str:
        """The mark of a message's end or start at which a malformed header stops; empty when there is none."""
        return next((m for m in (END, CALL, RETURN, START) if self.text.endswith(m) and self.text.lstrip() != m), "")

    @property
    def public(self) -> bool:
        """Whether the message may be shown to the user: it names the channel final or commentary, or none at all."""
        channels = re.findall(re.escape(CHANNEL) + r"\s*(\w*)", self.text)
        return all(c in ("final", "commentary") for c in channels) and (bool(channels) or "analysis" not in self.text)

    @property
    def calls(self) -> bool:
        """Whether the message is a call: it is for a tool, in a channel other than final."""
        return self.recipient not in ("", *ROLES) and self.channel != "final"

    @property
    def recipient(self) -> str:
        """Whom the message is for (``functions.add``); empty for the user."""
        found = re.search(r"(?:^|[\s>a-z])to=([^\s<]+)", self.text)
        return found[1] if found else ""

    @property
    def channel(self) -> str:
        """The message's channel; empty when it has none."""
        found = re.search(re.escape(CHANNEL) + r"\s*(\w+)", self.text)
        return found[1] if found else ""
