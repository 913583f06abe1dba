"""The calls of a run on disk, one JSON line each, so that a killed run resumes to the same result.

Given the results of its calls a strategy is deterministic, so resuming means running it again. Calls that the journal
holds return at once, with their original charge. The first call that it lacks is the first one made. A line is written
in one piece when a call has ended; a line torn by the kill is cut off. A refusal by a budget is a result too. The cost
seen of a failed call is kept as ``lost``: charged once, never replayed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TextIO

from kvasir.errors import ConfigError
from kvasir.scaling.ledger import Charge, plain

FORMAT = 1


def digest(value: Any) -> str:
    """A short fingerprint of any JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, ensure_ascii=False).encode(), digest_size=8).hexdigest()


class Journal:
    """The journal of one run.

    ``path`` None keeps the calls in memory only. ``plan`` describes the run; a journal of another plan is refused.
    """

    def __init__(self, path: Path | None = None, plan: dict[str, Any] | None = None) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self.lost: list[Charge] = []  # charges of calls that failed, in earlier runs and in this one
        self._file: TextIO | None = None
        if path is not None:
            self._open(path, {"format": FORMAT, "plan": plan or {}})

    def __len__(self) -> int:
        return len(self._entries)

    def _open(self, path: Path, head: dict[str, Any]) -> None:
        try:
            text = path.read_bytes() if path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self._read(path, [json.loads(line) for line in whole.splitlines()], json.loads(json.dumps(head)))
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(len(whole))
        except OSError as e:
            raise ConfigError(f"the journal {path.name} cannot be used: {e.strerror}") from e
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
            raise ConfigError(f"{path.name} is no journal of a run ({e}). Name another file.") from e
        if not whole:
            self._write(head)

    def _read(self, path: Path, lines: list[Any], head: dict[str, Any]) -> None:
        if not lines:
            return
        if lines[0] != head:
            old, new = lines[0].get("plan", {}), head["plan"]
            differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            raise ConfigError(
                f"the journal {path.name} is of another run: {', '.join(differ) or 'its format'} differ. "
                "Name another file."
            )
        for entry in lines[1:]:
            if "lost" in entry:
                self.lost.append(Charge(**entry["lost"]))
            else:
                self._entries[entry["key"]] = entry

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
        self._write({"lost": plain(charge)})
        self.lost.append(charge)

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
