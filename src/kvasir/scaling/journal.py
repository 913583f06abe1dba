"""The calls of a run on disk, one JSON line each, so that a killed run resumes to the same result.

Given the results of its calls a strategy is deterministic, so resuming means running it again. Calls that the journal
holds return at once, with their original charge. The first call that it lacks is the first one made. A line is written
in one piece when a call has ended; a call whose line was torn, by a kill or a full disk, is made again. A refusal by a
budget is a result too. The cost seen of a failed call is kept as ``lost``: charged once, never replayed.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvasir import records
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.plain_files import refuse_special
from kvasir.scaling.ledger import Charge, plain

FORMAT = 1
# The beginning of a journal's first line.
HEAD = b'{"format": 1, "plan":'


def digest(value: Any) -> str:
    """A short fingerprint of any JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, ensure_ascii=False).encode(), digest_size=8).hexdigest()


class JournalFull(ConfigError):
    """The outcome of a call cannot be kept, so the run ends: a later one could not repeat it."""


class Journal:
    """The journal of one run.

    ``path`` None keeps the calls in memory only. ``plan`` describes the run; a journal of another plan is refused.
    """

    def __init__(self, path: Path | None = None, plan: dict[str, Any] | None = None) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self.lost: list[Charge] = []  # charges of calls that failed, in earlier runs and in this one
        self._name = ""
        self._file: records.RecordFile | None = None
        if path is not None:
            self._open(path, {"format": FORMAT, "plan": plan or {}})

    def __len__(self) -> int:
        return len(self._entries)

    def _open(self, path: Path, head: dict[str, Any]) -> None:
        head = json.loads(json.dumps(head))
        self._name = path.name
        refuse_special(path, "--journal")
        try:
            found = records.read(path, _line) if path.exists() else records.Reading()
            torn = len(found.lost) == 1 and found.first[: len(HEAD)] == HEAD[: len(found.first)]  # the first record
            if found.lost and not found.records and not torn:
                raise ConfigError(f"{path.name} is no journal of a run. Name another file.")
            found.tell(path)
            self._take(found.records, head)
            if found.lost and found.lost[-1][1] == path.stat().st_size:  # a torn tail
                os.truncate(path, found.lost[-1][0])
            self._file = records.RecordFile(path)
        except OSError as e:
            raise ConfigError(f"the journal {path.name} cannot be used: {e.strerror}") from e
        if head not in found.records:
            self._write(head)

    def _take(self, lines: list[dict[str, Any]], head: dict[str, Any]) -> None:
        for line in lines:
            if "plan" in line and line != head:
                old, new = line["plan"], head["plan"]
                differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
                raise ConfigError(
                    f"the journal {self._name} is of another run: {', '.join(differ) or 'its format'} differ. "
                    "Name another file."
                )
            if "lost" in line:
                self.lost.append(Charge(**line["lost"]))
            elif "key" in line:
                self._entries[line["key"]] = line

    def find(self, key: str, request: str) -> dict[str, Any] | None:
        """The entry of an earlier call. Raises ConfigError when that call asked for something else."""
        entry = self._entries.get(key)
        if entry is not None and entry["request"] != request:
            raise ConfigError(
                f"call {key} of the journal asked for something else: prompts, models or code have changed. "
                "Name another file."
            )
        return entry

    def add(self, key: str, request: str, result: Any, charge: Charge | None) -> dict[str, Any]:
        """Write the outcome of a call. ``charge`` None: a refusal, which cost nothing."""
        entry = {"key": key, "request": request, "result": result, "charge": charge and plain(charge)}
        self._write(entry)
        self._entries[key] = entry
        return entry

    def add_lost(self, charge: Charge) -> None:
        """Write the charge of a failed call."""
        try:
            self._write({"lost": plain(charge)})
        except JournalFull as e:  # the call has failed already, for its own reason
            log.error("a charge is forgotten: %s", e)
        self.lost.append(charge)

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.append(json.dumps(entry, ensure_ascii=False).encode(errors="surrogatepass"))
        except OSError as e:
            raise JournalFull(
                f"the journal {self._name} cannot be written: {e.strerror}. The calls that ended before are in it; the "
                "same run continues from there when there is room"
            ) from e

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(text: bytes) -> dict[str, Any]:
    """Decode a line. Raises one of ``records.UNREADABLE``."""
    line = json.loads(text)
    if not isinstance(line, dict):
        raise TypeError("no object")
    if "lost" in line:
        Charge(**line["lost"])
    elif "plan" not in line:
        missing = {"key", "request", "result", "charge"} - set(line)
        if missing or not isinstance(line["key"], str):
            raise KeyError("no call")
        if line["charge"] is not None:
            Charge(**line["charge"])
    elif not isinstance(line["plan"], dict):
        raise TypeError("no plan")
    return line
