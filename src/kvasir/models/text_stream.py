"""Incremental decoding: token ids to text, one token or several at a time.

In almost every vocabulary a token stands for fixed bytes (byte-level BPE; SentencePiece with byte fallback), so an
incremental UTF-8 decoder gives the text exactly and in constant time per token. For other vocabularies the tokenizer
decodes a short window twice.

``tokenizers.decoders.DecodeStream`` does not replace this module. With byte fallback it raises "Invalid prefix" on
bytes that are not UTF-8; it holds such bytes back without limit and cannot be flushed at the end; after a prompt that
ends inside a character it gives text of the prompt again; and it is two to six times slower than the byte table.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer as Backend

from kvasir.models.guarded import Guarded

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenCodec:
    """The rule that turns a token's spelling into bytes, for vocabularies where the neighbours do not matter.

    ``space``: the character that stands for a space. ``strip``: one space at the start of a text is dropped. ``words``:
    every token is a whole word with a space before it.
    """

    def __init__(self, byte_level: bool, space: str = "▁", strip: bool = False, words: bool = False) -> None:
        self.byte_level = byte_level
        self.space = space
        self.strip = strip
        self.words = words

    @classmethod
    def of(cls, backend: Backend | Guarded) -> TokenCodec | None:
        """The rule of the tokenizer's decoder, or None when only the library knows it (WordPiece and others)."""
        if backend.decoder is None:
            return cls(False, strip=True, words=True)
        state = json.loads(backend.decoder.__getstate__())
        steps = state.get("decoders", [state])
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if kinds == ["Metaspace"]:
            return cls(False, steps[0]["replacement"], steps[0].get("prepend_scheme", "always") != "never")
        if (
            kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
            and steps[0].get("content") == " "
            and kinds[3:] in ([], ["Strip"])
        ):
            plain = all(s.get("content") == " " and s.get("start") == 1 and s.get("stop") == 0 for s in steps[3:])
            pattern = steps[0].get("pattern", {}).get("String")
            return cls(False, pattern, bool(kinds[3:])) if plain and pattern else None
        return None

    def bytes_of(self, token: str) -> bytes:
        """The bytes that ``token``, in the vocabulary's spelling, adds to a text."""
        if self.byte_level:
            table = _byte_of_char()
            # A token with a character outside the alphabet is an added token and stands for itself.
            return bytes([table[c] for c in token]) if all(c in table for c in token) else token.encode()
        if self.words:
            return b" " + token.encode()
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(self.space, " ").encode()


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of GPT-2's printable alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """A table from token id to bytes that fills itself on first use; an id outside the vocabulary has no bytes.

    ``spelling``: gives the token of an id. ``codec`` None: a token stands for itself.
    """

    def __init__(self, spelling: Callable[[int], str | None], codec: TokenCodec | None) -> None:
        super().__init__()
        self._spelling, self._bytes_of = spelling, codec.bytes_of if codec else str.encode

    def __missing__(self, token_id: int) -> bytes:
        token = self._spelling(token_id)
        if token is None:
            return b""
        found = self[token_id] = self._bytes_of(token)
        return found


class TextStream:
    """A stream that decodes byte by byte and gives out a character when its last byte has come."""

    def __init__(self, token_bytes: TokenBytes, strip: bool, prompt_ids: Sequence[int], skip: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip
        # A prompt may end inside a character, which the first new tokens then complete.
        self.extend(_tail(prompt_ids, skip, 8))

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while only the first bytes of a character have come."""
        return "" if token in self._skip else self._complete(self._token_bytes[token])

    def extend(self, tokens: Iterable[int]) -> str:
        """Return the joined texts that ``push`` gives for ``tokens``."""
        table, skip = self._token_bytes, self._skip
        return self._complete(b"".join([table[token] for token in tokens if token not in skip]))

    def _complete(self, data: bytes) -> str:
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """A stream for decoders in which a token's text depends on its neighbours.

    It decodes a short window with and without the new tokens, and gives out the difference once that does not end
    inside a character.
    """

    # Most tokens held back for an unfinished character, which has at most 4 bytes.
    MAX_NEW = 8
    # Tokens kept as context while new ones add no text.
    MAX_KNOWN = 32

    def __init__(self, backend: Backend | Guarded, prompt_ids: Sequence[int], skip: frozenset[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._known = _tail(prompt_ids, skip, 6)  # given out already, kept as context
        self._new: list[int] = []  # not given out yet

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        if token in self._skip:
            return ""
        self._new.append(token)
        return self._take(final=len(self._new) > self.MAX_NEW)

    def extend(self, tokens: Iterable[int]) -> str:
        """Return the joined texts that ``push`` gives for ``tokens``."""
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        """Return the rest at the end."""
        return self._take(final=True) if self._new else ""

    def _take(self, final: bool) -> str:
        before = self._backend.decode(self._known, skip_special_tokens=False)
        after = self._backend.decode(self._known + self._new, skip_special_tokens=False)
        if not final and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._known = self._new if len(after) > len(before) else (self._known + self._new)[-self.MAX_KNOWN :]
        self._new = []
        return after[len(before) :]


def _tail(ids: Sequence[int], skip: frozenset[int], count: int) -> list[int]:
    """The last ``count`` ids that are not skipped."""
    found: list[int] = []
    for token in reversed(ids):
        if len(found) == count:
            break
        if token not in skip:
            found.append(token)
    return found[::-1]
