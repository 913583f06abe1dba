"""Files of strangers: only plain ones are opened. Reading a pipe, a socket or a device may never end."""

from __future__ import annotations

from pathlib import Path

from kvasir.errors import ConfigError


def refuse_special(path: Path, option: str = "") -> None:
    """Raise ConfigError for a path, or an entry of a folder, that exists and is neither a file nor a folder, and for a
    path that cannot be looked at. ``option``: the option that names it, for the message."""
    given = f"{option}: " if option else ""
    try:
        for entry in (path, *(sorted(path.iterdir()) if path.is_dir() else ())):
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise ConfigError(
                    f"{given}{entry} is a pipe, a socket or a device, and not a file: it is not read, because that may "
                    "never end. Put a plain file in its place"
                )
    except OSError as e:
        raise ConfigError(f"{given}cannot read {path}: {e.strerror}. Check the path and its permissions") from e


def read_text(file: Path) -> str:
    """The text of a plain file in UTF-8, without a byte order mark. Raises ConfigError that names it."""
    refuse_special(file)
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is not a file")
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file} is not text in UTF-8: {e}") from e
