"""The cells of a study that may be cut off and goes on: lines ``[key, found]`` of a file that grows (`kvasir.records`).

A cell is written when it is done. A full disk or a kill costs the cell of that moment, which is measured again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir import records
from kvasir.errors import ConfigError

Cells = dict[tuple, dict[str, Any]]


def read_cells(file: Path) -> Cells:
    """The cells of earlier runs by key. The log says which lines cannot be read. Raises ConfigError when no cell could
    be added to the file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with records.RecordFile(file):
            found = records.read(file, _cell)
    except OSError as e:
        raise ConfigError(f"cannot keep cells in {file}: {e.strerror}. Name an output in another folder") from e
    found.tell(file)
    return dict(found.records)


def _cell(line: bytes) -> tuple[tuple, dict[str, Any]]:
    """Decode a line. Raises one of ``records.UNREADABLE``."""
    key, found = json.loads(line)
    if not isinstance(key, list) or not isinstance(found, dict):
        raise TypeError("no cell")
    return tuple(key), found


def keep_cell(file: Path, key: tuple, found: dict[str, Any]) -> None:
    """Write a cell that is done. Raises ConfigError when it cannot be kept; the cells before are in the file."""
    try:
        with records.RecordFile(file) as out:
            out.append(json.dumps([key, found]).encode())
    except OSError as e:
        raise ConfigError(
            f"cannot keep a cell in {file}: {e.strerror}. Make room and run the same command again: it goes on there"
        ) from e
