"""Background runs on disk, so that they outlive the server: three files per run in one folder.

``ID.run.json`` holds the request and is written before the client hears of the run. ``ID.calls.jsonl`` is the journal
of its calls (``scaling.journal``). ``ID.end.json`` says how it ended. A run without the last file was active when the
server ended, and is run again from its journal: finished calls return at once with their old cost, and only the others
are made.

Prompts and replies are private, so only the owner can read the files. Two servers cannot share a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any, TextIO

from kvasir import records
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.plain_files import refuse_special

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
ASKED, ENDED = {"owner", "problems", "seed", "created", "asked"}, {"status", "error", "results", "amounts", "done"}
PARTS = ("run.json", "calls.jsonl", "end.json")


class RunStore:
    """The folder of the runs, which is created if it is missing. Raises ConfigError when it cannot be used, or another
    server uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        refuse_special(folder, "--scaling-runs")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: TextIO | None = (folder / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(
                f"--scaling-runs: another server keeps its runs in {folder.name}; give each a folder of its own"
            ) from e
        except OSError as e:
            raise ConfigError(
                f"--scaling-runs: {folder} cannot be used: {e.strerror}. Name a folder that can be written"
            ) from e

    def close(self) -> None:
        """Release the folder for the next server."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def calls(self, name: str) -> Path:
        """The run's journal file, created with mode 0600."""
        path = self._path(name, "calls.jsonl")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        return path

    def begin(self, name: str, record: dict[str, Any]) -> None:
        """Write the record of a new run. Raises OSError; the run then does not exist."""
        self._write(name, "run.json", record)

    def end(self, name: str, record: dict[str, Any]) -> None:
        """Write how the run ended and delete its journal. If the disk is full, the next server repeats the run."""
        try:
            self._write(name, "end.json", record)
            self._path(name, "calls.jsonl").unlink(missing_ok=True)
        except OSError as e:
            log.error("the end of scaling run %s could not be kept: %s", name, e)

    def drop(self, name: str) -> None:
        """Forget a run."""
        try:
            for part in PARTS:
                self._path(name, part).unlink(missing_ok=True)
        except OSError as e:  # the next server forgets it
            log.error("scaling run %s could not be forgotten: %s", name, e)

    def load(self) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
        """The runs, oldest first: name, request, and end or None. Unreadable records are logged and left in place; a
        run whose end cannot be read has none."""
        found = []
        for path in self.folder.glob("*.run.json"):
            name = path.name.removesuffix(".run.json")
            try:
                asked = _read(path, ASKED)
                created = float(asked["created"])
            except (OSError, *records.UNREADABLE) as e:
                log.error("scaling run %s cannot be read and is left alone: %s", name, e)
                continue
            end = self._path(name, "end.json")
            try:
                ended = _read(end, ENDED) if end.exists() else None
            except (OSError, *records.UNREADABLE) as e:
                log.error("the end of scaling run %s cannot be read, so it is run again: %s", name, e)
                ended = None
            found.append((created, name, asked, ended))
        return [entry[1:] for entry in sorted(found, key=lambda entry: entry[:2])]

    def _path(self, name: str, part: str) -> Path:
        assert NAME.fullmatch(name), f"{name!r} is not a name of a run"
        return self.folder / f"{name}.{part}"

    def _write(self, name: str, part: str, record: dict[str, Any]) -> None:
        """Write a file as a whole or not at all, even if the process or the machine ends meanwhile."""
        content = json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass")
        records.replace(self._path(name, part), content, private=True)


def _read(path: Path, fields: set[str]) -> dict[str, Any]:
    """Read a record with these fields. Raises OSError, or one of ``records.UNREADABLE``."""
    record = json.loads(path.read_bytes())
    if not isinstance(record, dict):
        raise TypeError("it is no object")
    if lacking := fields - set(record):
        raise ValueError(f"it has no {', '.join(sorted(lacking))}")
    return record
