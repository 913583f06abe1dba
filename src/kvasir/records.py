"""Files that grow by records, one JSON object a line: a failed write leaves no trace, a torn record costs only itself.

A disk fills up, a machine loses power, a process is killed: any of them may leave half a record at the end of a file.
So a write that fails is cut off again before its error is raised, each record begins on a line of its own whatever
stands before it, and a reader goes on after a line that it cannot read and says what is lost. Files that are written
again and again are replaced as a whole (``replace``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from kvasir.errors import ConfigError
from kvasir.logs import log

T = TypeVar("T")

# What a decoder raises for a line that is no record.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgspec.MsgspecError)
# Most byte ranges that the line about lost records names.
MAX_TOLD = 8
# Bytes that a disk must have room for when a file is tried: a block of most file systems.
TRIED_BYTES = 4096
# Errors of a folder that takes no new file, although a file in it may be written: rights, and a mounted file.
NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


class RecordFile:
    """A file that records are appended to; it is created if it is missing. Raises OSError.

    ``private``: only the owner may read it (mode 0600, even when it existed with another), and a symbolic link is not
    followed. ``sync``: a record is on the disk when ``append`` returns. A device or pipe is written as it is; a pipe
    that nobody reads is an OSError.
    """

    def __init__(self, path: str | Path, *, private: bool = False, sync: bool = False) -> None:
        self._sync = sync
        flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if private else 0)
        # The last byte is read before a record is written. A pipe opened for reading, too, would never block or break.
        self._regular = not os.path.exists(path) or os.path.isfile(path)
        mode = os.O_RDWR if self._regular else os.O_WRONLY | os.O_NONBLOCK
        try:
            self._handle = os.open(path, flags | mode, 0o600 if private else 0o666)
        except OSError as e:
            if e.errno == errno.ENXIO:  # without O_NONBLOCK, opening would wait for a reader
                raise OSError(e.errno, "Nobody reads this pipe", str(path)) from e
            raise
        try:
            os.set_blocking(self._handle, True)
            self._regular = stat.S_ISREG(os.fstat(self._handle).st_mode)
            if private:
                os.fchmod(self._handle, 0o600)
        except BaseException:
            self.close()
            raise

    def append(self, *lines: bytes) -> None:
        """Write records that hold no line break, all or none. Raises OSError; the file is then as before."""
        text, start = b"".join(line + b"\n" for line in lines), 0
        if self._regular:
            start = os.lseek(self._handle, 0, os.SEEK_END)
            if start and os.pread(self._handle, 1, start - 1) != b"\n":
                text = b"\n" + text
        done = 0
        try:
            while done < len(text):
                done += os.write(self._handle, text[done:] if done else text)
            if self._sync:
                os.fsync(self._handle)
        except BaseException:
            if self._regular:
                with contextlib.suppress(OSError):  # then the next record begins on a line of its own
                    self._cut(start, done)
            raise

    def try_room(self) -> None:
        """Write one block of blanks, and cut it off again: a file that cannot grow is found before the work. Blank
        lines are no records, so a kill in between harms nobody. Raises OSError. A device or pipe is not tried."""
        if not self._regular:
            return
        start = os.lseek(self._handle, 0, os.SEEK_END)
        self.append(b" " * (TRIED_BYTES - 1))
        self._cut(start, TRIED_BYTES + 1)

    def _cut(self, start: int, done: int) -> None:
        """Take a failed write back, unless somebody else has written behind it."""
        if os.fstat(self._handle).st_size <= start + done:
            os.ftruncate(self._handle, start)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def append(path: str | Path, lines: list[bytes]) -> None:
    """Append records to a private file and wait until they are on the disk: all or none. Raises OSError."""
    if lines:
        with RecordFile(path, private=True, sync=True) as file:
            file.append(*lines)


def check_folder(folder: str | Path, option: str) -> None:
    """Make a folder if it is missing. Raises ConfigError, which names the option, when it takes no file or is full."""
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file, RecordFile(file.name, sync=True) as record:
            record.try_room()
    except OSError as e:
        raise ConfigError(
            f"{option}: no file can be made in {folder}: {e.strerror}. Name a folder that can be written and has room"
        ) from e


def replace(path: str | Path, content: bytes, *, private: bool = False) -> None:
    """Write a file as a whole or not at all, even if the process or the machine ends meanwhile. Raises OSError; the
    file is then as before. ``private``: only the owner may read a new file (mode 0600).

    A device or pipe is written as it is, and so is a file in a folder that takes no other.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(content)
        return
    path = Path(os.path.realpath(path))  # a link stays, and leads to the new content
    fresh = path.with_name(f"{path.name}.new")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(fresh, flags, 0o600 if private else 0o666), "wb", buffering=0) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            done = 0
            while done < len(content):
                done += os.write(file.fileno(), content[done:])
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        if mode is None or not isinstance(error, OSError) or error.errno not in NO_NEW_FILE:
            raise
        path.write_bytes(content)


@dataclass(slots=True)
class Reading(Generic[T]):
    """The records of a file in order. ``lost``: byte ranges (begin, end) of the lines that could not be read."""

    records: list[T] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    first: bytes = b""  # the first line that is not empty

    def tell(self, path: str | Path) -> None:
        """Log what was lost, in one line; nothing when all was read."""
        if not self.lost:
            return
        ranges = [f"{begin} to {end}" for begin, end in self.lost[:MAX_TOLD]]
        more = "" if len(self.lost) <= MAX_TOLD else f" and {len(self.lost) - MAX_TOLD} more places"
        count = f"{len(self.lost)} records are" if len(self.lost) > 1 else "1 record is"
        log.error(
            "%s: bytes %s%s cannot be read, so %s lost; the other %d are there",
            path,
            ", ".join(ranges),
            more,
            count,
            len(self.records),
        )


def read(path: str | Path, decode: Callable[[bytes], T]) -> Reading[T]:
    """Read the records of a file that exists. ``decode`` raises one of ``UNREADABLE`` for a line that is no record.
    A last line without its end counts when it can be decoded: the record in it is whole. Raises OSError."""
    found: Reading[T] = Reading()
    begin = 0
    for line in Path(path).read_bytes().split(b"\n"):
        end = begin + len(line)
        if line.strip():
            found.first = found.first or line
            try:
                found.records.append(decode(line))
            except UNREADABLE:
                found.lost.append((begin, end))
        begin = end + 1
    return found
