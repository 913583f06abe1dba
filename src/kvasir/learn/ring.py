"""A ring of traces in shared memory: one process writes, one reads, and nobody waits.

The writer overwrites the oldest records, whether they were read or not. So a reader that is slow, dead or not there
costs the writer nothing. Of the records that are overwritten unread, a uniform sample is kept in a *reservoir*, an
eighth of the memory, which the reader gets when the ring is empty: traffic of an hour ago stays in the mixture.

The memory has no name in a file system: it is anonymous, and ``ring`` in the folder is a link to the writer's
descriptor. Traces therefore never reach a disk, and are gone with the two processes. Where the system has no anonymous
files, ``ring`` is an ordinary file.

Bytes are copied by numpy, which lets go of the interpreter meanwhile: records of some megabytes come many times a
second, in a thread beside the engine's steps.

A record is a head of four words (size, tokens, checksum, place) and its bytes, padded to 8. Only the writer writes, but
for one word that says how far the reader is. The reader copies a record, and then looks whether the writer has come by
meanwhile; the checksum finds what that look may miss on a machine that reorders memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

NAME = "ring"
# Words of the head: bytes ever written, oldest byte that is whole, bytes ever read, sizes of the two parts, tokens
# dropped, records of them.
WRITTEN, OLDEST, READ, SIZE, RESERVED, DROPPED, LOST = range(7)
HEAD_BYTES, RECORD_BYTES = 4096, 32
WORDS = HEAD_BYTES // 8
# The reservoir is an eighth of the memory, in slots of equal size. A record that is longer than a slot is not kept.
SHARE, SLOTS = 8, 8
LEAST_BYTES = 1 << 16
# Words of the head from which on the slots are noted, two each: their turn (odd: being written) as the writer counts
# it, and the turn that the reader has read.
SLOT_WORDS = 16


class TraceRing:
    """One end of the ring. ``create`` gives the writer's, ``open`` the reader's. Neither end is for several threads."""

    def __init__(self, memory: mmap.mmap, descriptor: int, link: Path | None, seed: int = 0) -> None:
        self._map, self._descriptor, self._link, self._closed = memory, descriptor, link, False
        self._words = memoryview(memory)[:HEAD_BYTES].cast("Q")
        self._bytes = np.frombuffer(memory, np.uint8)
        self._random = random.Random(seed)

    @classmethod
    def create(cls, folder: str | Path, num_bytes: int) -> TraceRing:
        """Make a ring of ``num_bytes`` of memory, found by ``open`` with the same folder. Raises OSError where there is
        no memory, and ValueError for less than ``LEAST_BYTES``."""
        if num_bytes < LEAST_BYTES:
            raise ValueError(f"a ring of {num_bytes} bytes: at least {LEAST_BYTES}")
        link, num_bytes = Path(folder) / NAME, num_bytes // 128 * 128
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("kvasir-traces", os.MFD_CLOEXEC)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{handle}")
        else:
            handle = os.open(link, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(handle, HEAD_BYTES + num_bytes)
        ring = cls(mmap.mmap(handle, HEAD_BYTES + num_bytes), handle, link)
        reserved = num_bytes // SHARE // SLOTS // 8 * 8 * SLOTS
        ring._words[SIZE], ring._words[RESERVED] = num_bytes - reserved, reserved
        return ring

    @classmethod
    def open(cls, folder: str | Path) -> TraceRing:
        """The reader's end. Raises OSError where there is no ring, for example because its writer has ended."""
        handle = os.open(Path(folder) / NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(handle, os.fstat(handle).st_size), -1, None)
        finally:
            os.close(handle)

    @property
    def dropped(self) -> int:
        """Tokens of the records that were overwritten before they were read, as far as the writer could see. Those that
        went into the reservoir are among them until they are read."""
        return self._words[DROPPED]

    @property
    def largest(self) -> int:
        """Most bytes of a record: half of the ring."""
        return self._words[SIZE] // 2 - RECORD_BYTES

    # ------------------------------------------------------------------------------------------------------ the writer

    def put(self, data: bytes | Sequence[np.ndarray], tokens: int = 0) -> bool:
        """Write a record of ``tokens`` tokens over the oldest ones. Never waits. False: it is longer than ``largest``
        or the ring is closed, and nothing was written. ``data``: its bytes, or pieces [N] uint8 of them."""
        parts = [np.frombuffer(data, np.uint8)] if isinstance(data, bytes) else data
        count = sum(map(len, parts))
        if self._closed or not count or count > self.largest:
            return False
        words, size = self._words, self._words[SIZE]
        length = _padded(count)
        at = words[WRITTEN]
        if at % size + length > size:  # a record does not wrap: it starts over
            at += size - at % size
        self._make_room(at + length)
        self._write(HEAD_BYTES + at % size, parts, tokens, at)
        words[WRITTEN] = at + length
        return True

    def _write(self, place: int, parts: Sequence[np.ndarray], tokens: int, at: int) -> None:
        """Write head and bytes of a record to ``place``."""
        head, checksum, end = self._head(place), 0, place + RECORD_BYTES
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        head[:] = sum(map(len, parts)), tokens, checksum, at
        for part in parts:
            self._bytes[end : (end := end + len(part))] = part

    def _head(self, place: int) -> np.ndarray:
        """The four words of the head of the record at ``place``."""
        return self._bytes[place : place + RECORD_BYTES].view(np.uint64)

    def _make_room(self, end: int) -> None:
        """Give up the oldest records, so that what is written up to ``end`` meets none of them."""
        words, size = self._words, self._words[SIZE]
        oldest = words[OLDEST]
        while oldest < words[WRITTEN] and end - oldest > size:
            found = self._record(oldest)
            if found is None:  # the gap before a record that started over
                oldest += size - oldest % size
                words[OLDEST] = oldest
                continue
            length, tokens = found
            if words[READ] <= oldest:
                words[DROPPED] += tokens
                words[LOST] += 1
                self._keep(HEAD_BYTES + oldest % size, length, tokens)
            oldest += _padded(length)
            words[OLDEST] = oldest
        words[OLDEST] = max(words[OLDEST], min(oldest, words[WRITTEN]))

    def _record(self, at: int) -> tuple[int, int] | None:
        """Length and tokens of the record that starts at ``at``; None: none starts there."""
        size = self._words[SIZE]
        if at % size + RECORD_BYTES > size:
            return None
        length, tokens, _, mine = self._head(HEAD_BYTES + at % size).tolist()
        return (length, tokens) if mine == at else None

    def _keep(self, place: int, length: int, tokens: int) -> None:
        """Take the record at ``place`` into the reservoir with the chance that a uniform sample gives it."""
        words, size = self._words, self._words[RESERVED] // SLOTS
        if RECORD_BYTES + length > size:
            return
        free = next((i for i in range(SLOTS) if words[_turn(i)] == words[_turn(i) + 1]), None)
        slot = self._random.randrange(words[LOST]) if free is None else free
        if slot < SLOTS:
            words[_turn(slot)] += 1  # odd: the reader leaves it alone
            self._write(self._slot(slot), [self._bytes[place + RECORD_BYTES :][:length]], tokens, slot)
            words[_turn(slot)] += 1

    def _slot(self, slot: int) -> int:
        return HEAD_BYTES + self._words[SIZE] + slot * (self._words[RESERVED] // SLOTS)

    # ------------------------------------------------------------------------------------------------------ the reader

    def take(self) -> bytes | None:
        """The oldest record that was not read, or one of the reservoir where all others were. None: there is none.

        Never waits. A record that is overwritten while it is read is left out."""
        if self._closed:
            return None
        words, size = self._words, self._words[SIZE]
        while (at := max(words[READ], words[OLDEST])) < words[WRITTEN]:
            found = self._record(at)
            if found is None:
                if words[OLDEST] <= at:
                    words[READ] = at + size - at % size
                continue
            data = self._copied(HEAD_BYTES + at % size, found[0], self._words[SIZE])
            if words[OLDEST] > at:
                continue
            words[READ] = at + _padded(found[0])
            if data is not None:
                return data
        return self._from_reservoir()

    def _copied(self, place: int, length: int, most: int) -> bytes | None:
        """The bytes of the record at ``place``; None where they do not match the checksum."""
        checksum = int(self._head(place)[2])
        data = self._bytes[place + RECORD_BYTES :][: min(length, most)].tobytes()
        return data if zlib.crc32(data) == checksum else None

    def _from_reservoir(self) -> bytes | None:
        words = self._words
        for slot in range(SLOTS):
            turn, place = words[_turn(slot)], self._slot(slot)
            if turn % 2 or turn == words[_turn(slot) + 1]:
                continue
            data = self._copied(place, int(self._head(place)[0]), words[RESERVED] // SLOTS)
            if words[_turn(slot)] == turn:
                words[_turn(slot) + 1] = turn
                if data is not None:
                    return data
        return None

    def clear(self) -> None:
        """Forget all records, as the writer: they are not to be learned from. The reader may still hold some."""
        words = self._words
        for slot in range(SLOTS):
            words[_turn(slot) + 1] = words[_turn(slot)]
        words[OLDEST] = words[WRITTEN]

    def close(self) -> None:
        """Give the memory back. Further calls of ``put`` and ``take`` do nothing."""
        if self._closed:
            return
        self._closed = True
        self._words.release()
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._link is not None:
            os.close(self._descriptor)
            self._link.unlink(missing_ok=True)


def _padded(length: int) -> int:
    """Bytes that a record of ``length`` takes in the ring."""
    return RECORD_BYTES + (length + 7) // 8 * 8


def _turn(slot: int) -> int:
    """The word of a slot's turn; the reader's stands behind it."""
    return SLOT_WORDS + 2 * slot
