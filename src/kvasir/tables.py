"""Tables as data: TOML files in the package, read with a schema. An error names the file and the field."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from kvasir.errors import ConfigError

T = TypeVar("T")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of what a table holds. A field that it does not declare is an error."""


def load(file: Path, kind: type[T]) -> T:
    """Read a TOML file as a value of the type ``kind``.

    Raises ConfigError, which names the file and the field, when the file cannot be read or does not fit the type."""
    try:
        return msgspec.toml.decode(file.read_bytes(), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as e:
        raise ConfigError(f"{file}: {e}") from e
