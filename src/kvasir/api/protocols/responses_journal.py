"""Background responses in the server's journal (``--journal``), so that they outlive the server.

Three kinds of lines, next to the requests that the engine's client writes when it stops (``client.journal``): ``begun``
is written before the client hears of the response, ``ended`` holds the finished response, ``dropped`` says that it was
deleted. A response without the last two was being generated when the server ended. The next server generates it again
with the same seed, or goes on after the tokens that a journalled request holds. Without a file nothing is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.api.http.streaming import encode
from kvasir.client import journal
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.records import RecordFile
from kvasir.types import Request

# Fields of the two records that hold a response.
FIELDS = {
    "begun": {"id", "owner", "tenant", "created", "model", "seed", "items", "body"},
    "ended": {"id", "owner", "created", "items", "object"},
}
# Size at which the file is rewritten without what is forgotten, in bytes.
COMPACT_BYTES = 64 << 20


def check_kind(path: Path) -> None:
    """Raise ConfigError for a pipe, a socket or a device, which the next server could not read."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(
            f"--journal: {path} is a pipe, a socket or a device. What is written there cannot be read back, so no "
            "response would outlive the server. Name a file in a folder that can be written, or leave --journal out"
        )


class ResponseJournal:
    """The journal file of one server. It is locked: two servers cannot share one. Raises ConfigError when it cannot be
    used."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        self._turn = threading.Lock()  # writes run in threads
        self._lock = -1
        self._size = 0  # of the file when it was last rewritten
        if self.path is not None:
            check_kind(self.path)
            try:
                self._lock = self._locked(self.path)
                self._try_room()
            except BlockingIOError as e:
                raise ConfigError(
                    f"--journal: another server writes {self.path.name}; give each a journal of its own"
                ) from e
            except OSError as e:
                raise ConfigError(
                    f"--journal: {self.path} cannot be used: {e.strerror}. Name a file in a folder that can be written"
                    " and has room"
                ) from e

    def _try_room(self) -> None:
        """Try that the file can grow: otherwise every background response of this server would be refused."""
        assert self.path is not None
        try:
            with RecordFile(self.path, private=True, sync=True) as file:
                file.try_room()
        except OSError:
            self.close()
            raise

    @staticmethod
    def _locked(path: Path) -> int:
        """Open the file with an exclusive lock. Raises OSError."""
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # it was rewritten meanwhile

    def close(self) -> None:
        """Release the file for the next server. Nothing is written after this; an empty file is removed."""
        with self._turn:
            if self._lock >= 0:
                assert self.path is not None
                if not os.fstat(self._lock).st_size:
                    with contextlib.suppress(OSError):  # an empty file does no harm
                        self.path.unlink(missing_ok=True)
                os.close(self._lock)
                self._lock = -1

    def begin(self, record: dict[str, Any]) -> None:
        """Write a new background response. Raises OSError; the response then does not exist."""
        self._append({"record": "begun", **record})

    def end(self, record: dict[str, Any]) -> None:
        """Write a finished response. Raises OSError; the next server then generates it again."""
        self._append({"record": "ended", **record})

    def drop(self, name: str) -> None:
        """Write that a response is gone. Raises OSError."""
        self._append({"record": "dropped", "id": name})

    def _append(self, record: dict[str, Any]) -> None:
        with self._turn:
            if self._lock >= 0:
                assert self.path is not None
                journal.append(self.path, [encode(record)])

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, Request]]:
        """The last record of each response, oldest first, and the journalled requests, both by id.

        Requests of clients that are gone have no reader any more; ``compact`` forgets them. Raises ConfigError.
        """
        if self.path is None:
            return {}, {}
        try:
            requests, records = journal.read(self.path)
        except (OSError, ValueError) as e:
            raise ConfigError(f"--journal: {e}. Name another file.") from e
        return _latest(records), {request.id: request for request in requests}

    def full(self) -> bool:
        """Whether the file has grown so much that ``compact`` is due."""
        with self._turn:
            return self._lock >= 0 and os.fstat(self._lock).st_size > max(COMPACT_BYTES, 2 * self._size)

    def compact(self, kept: Callable[[str], bool]) -> None:
        """Rewrite the file as a whole or not at all, with the last record of each response that is still kept.
        Raises OSError."""
        with self._turn:
            if self._lock < 0:
                return
            assert self.path is not None
            lines = [encode(r) for r in _latest(journal.read(self.path, told=False)[1]).values() if kept(r["id"])]
            fresh = self.path.with_name(f"{self.path.name}.new")
            fresh.unlink(missing_ok=True)
            handle = self._locked(fresh)
            try:
                journal.append(fresh, lines)
                fresh.replace(self.path)
            except BaseException:
                os.close(handle)
                fresh.unlink(missing_ok=True)
                raise
            os.close(self._lock)
            self._lock, self._size = handle, os.fstat(handle).st_size


def _latest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last record of each response that was not dropped, in the order in which they began."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["record"] == "dropped":
            found.pop(str(record.get("id")), None)
        elif _whole(record):
            found[record["id"]] = record
        else:
            log.error("a record of the journal cannot be read and is forgotten")
    return found


def _whole(record: dict[str, Any]) -> bool:
    """Whether a record has the fields of its kind, and those that a server's start reads are of the right kind."""
    fields = FIELDS.get(str(record["record"]))
    kinds = {"id": str, "owner": str, "created": (int, float), "items": list, "object": dict}
    return fields is not None and all(
        name in record and isinstance(record[name], kinds.get(name, object)) for name in fields
    )
