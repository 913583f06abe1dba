"""The journal of requests and delivered tokens, so that no death of the engine process loses a request.

It has one entry per request. ``Entry.request`` always holds what a fresh engine needs to continue: prompt, parameters,
seed, and the tokens that readers already have. Events may come twice or from an engine that is gone; ``Entry.admit``
lets each token through once, in order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvasir import records
from kvasir.errors import RequestError
from kvasir.types import BareLogprobs, Event, Request

# The beginning of a line that is no request but a record of another part of the server.
RECORD = b'{"record":'
# The beginning of a line that is a request.
REQUEST = b'{"id":"'


class GapError(Exception):
    """The engine skipped tokens of a request: its reader must not see the rest."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request from its submission to its terminal reply.

    ``ticket``: a number that is unique within the client. ``holder``: number of the replica whose living process holds
    the request, in the epoch ``request.epoch``; None: no replica does. Events of earlier epochs are nobody's.
    ``closed``: nobody reads the request any more; the entry stays until the engine confirms the end, so that the id is
    not free too early. ``cancelled``: branches that a cancel was asked for. ``fresh``: tokens since the last
    submission. ``crashes``: deaths of the engine process while it worked on this request. ``strikes``: crashes since
    the request last proved harmless. ``blamed_in``: number of the replica of the last crash (-1: there was none).
    """

    request: Request
    ticket: int
    accepted: bool = False
    holder: int | None = None
    closed: bool = False
    prompt_delivered: bool = False
    cancelled: set[int] = field(default_factory=set)
    fresh: int = 0
    crashes: float = 0.0
    strikes: float = 0.0
    blamed_in: int = -1

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def branches(self) -> range:
        return range(self.request.params.n)

    @property
    def live_branches(self) -> list[int]:
        return [branch for branch in self.branches if branch not in self.request.ended]

    @property
    def done(self) -> bool:
        return len(self.request.ended) >= self.request.params.n

    def admit(self, event: Event) -> Event | None:
        """Record an event and return its new part, or None. Raises GapError when tokens before it are missing."""
        if event.epoch != self.request.epoch or self.done:
            return None
        if event.kind == "accepted":
            known, self.accepted = self.accepted, True
            return None if known else event
        if event.kind == "error":
            self.request.ended = list(self.branches)
            return event
        if event.branch not in self.branches:
            raise GapError(f"branch {event.branch} of a request with {len(self.branches)}")
        return None if event.branch in self.request.ended else self._admit_tokens(event)

    def _admit_tokens(self, event: Event) -> Event | None:
        if self.closed:  # nobody reads the tokens; only the end matters
            if event.finish_reason is not None:
                self.request.ended.append(event.branch)
            return None
        known = self.request.emitted[event.branch]
        seen = len(known) - event.index
        if seen < 0:
            raise GapError(f"tokens {len(known)} to {event.index - 1} of branch {event.branch} never came")
        tokens = event.token_ids[seen:]
        prompt = None if self.prompt_delivered else event.prompt_logprobs
        if not tokens and prompt is None and event.finish_reason is None:
            return None
        known.extend(tokens)
        self.fresh += len(tokens)
        self.prompt_delivered = self.prompt_delivered or prompt is not None
        if event.finish_reason is not None:
            self.request.ended.append(event.branch)
        if not seen and prompt is event.prompt_logprobs:
            return event
        logprobs = event.logprobs[seen:] if event.logprobs is not None else None
        bare = event.bare and BareLogprobs(event.bare.logprobs[seen:], event.bare.confidences[seen:])
        return dataclasses.replace(
            event,
            index=event.index + seen,
            token_ids=tokens,
            logprobs=logprobs,
            bare=bare,
            prompt_logprobs=prompt,
            forced=[place for place in event.forced if place >= event.index + seen],
        )

    def rewind(self) -> None:
        """Take the request back from its holder, whose late events then belong to an older epoch."""
        if self.holder is not None:
            self.request.epoch += 1
        self.holder = None
        self.fresh = 0


class Journal:
    """The entries by request id, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._last_ticket = 0

    def add(self, request: Request) -> Entry:
        """Open an entry with its own copy of the request's state. Raises RequestError (409) for an id in use."""
        if request.id in self._entries:
            raise RequestError(
                f"a request with the id '{request.id}' is in progress",
                status=409,
                param="request_id",
                code="duplicate_id",
            )
        emitted = [list(tokens) for tokens in request.emitted[: request.params.n]]
        emitted += [[] for _ in range(request.params.n - len(emitted))]
        own = dataclasses.replace(request, emitted=emitted, ended=sorted(set(request.ended)))
        self._last_ticket += 1
        entry = self._entries[request.id] = Entry(own, self._last_ticket)
        return entry

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def remove(self, entry: Entry) -> None:
        """Forget an entry; no harm when it is gone or its id belongs to a later one."""
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id]

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)


def write(path: str | Path, requests: Iterable[Request]) -> int:
    """Append the requests to a journal file, one JSON object a line, and return their number.

    Prompts and outputs are private: the file gets mode 0600 even when it existed with another mode, and a symbolic link
    is not followed. Raises OSError.
    """
    lines = [msgspec.json.encode(request) for request in requests]
    append(path, lines)
    return len(lines)


def append(path: str | Path, lines: list[bytes]) -> None:
    """Append lines to a journal file, as ``write`` does: all or none. Raises OSError."""
    records.append(path, lines)


def load(path: str | Path) -> list[Request]:
    """Read the requests of a journal file; see ``read``."""
    return read(path)[0]


def read(path: str | Path, told: bool = True) -> tuple[list[Request], list[dict[str, Any]]]:
    """Read the requests of a journal file, and the records that others wrote into it: objects that begin with
    ``RECORD``. Each request can be submitted again and continues after the tokens it already has.

    An arrival in the future becomes now, because the clock of arrivals restarts with the machine. Lines that cannot be
    read (torn by a kill or a full disk) are left out; ``told``: the log says so. Raises OSError, and ValueError for a
    file that holds something else.
    """
    found = records.read(path, _decode)
    if not found.records and found.lost and not _begins(found.first):
        raise ValueError(f"{path} is not a journal: no line of it is a journalled request or a record")
    if told:
        found.tell(path)
    requests = [line for line in found.records if isinstance(line, Request)]
    for request in requests:
        request.arrival = min(request.arrival, time.monotonic())
    return requests, [line for line in found.records if isinstance(line, dict)]


def _decode(line: bytes) -> Request | dict[str, Any]:
    if line.startswith(RECORD):
        return msgspec.json.decode(line, type=dict[str, Any])
    return msgspec.json.decode(line, type=Request)


def _begins(line: bytes) -> bool:
    """Whether a line is the beginning of one of a journal. Zeros are what a power cut leaves of any line."""
    return not line.strip(b"\0") or any(line.startswith(start) or start.startswith(line) for start in (RECORD, REQUEST))
