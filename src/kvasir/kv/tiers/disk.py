"""Pages in files of one folder, found again after a restart with the same weights and settings. Exact.

Each cache group has two files. Slot i of ``GROUP.pages`` is one page. Record i of ``GROUP.records`` names what it
holds: prefix key, key of the page before, tokens, variant, and a checksum of the page. Both checksums, that of the page
and that of the record itself, are keyed with a secret and cover the prefix key, so that a page that was cut, changed,
moved or written by somebody else is never served. The page is written before its record. Nothing is synced: what a
power cut tears is found by its checksum.

``head`` names the weights and settings. A folder of others is begun anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from kvasir.client.interface import StoredPage
from kvasir.client.page_keys import tenant_digest
from kvasir.errors import ConfigError
from kvasir.kv.links import Link, ThreadLink
from kvasir.kv.tier import Found, Move, Place, Tier
from kvasir.logs import log
from kvasir.records import check_folder, replace

# Layout of a record before its tokens: number of the write, prefix key, key of the page before, digest of the tenant,
# checksum of the page, length of the variant, and the variant.
HEAD = struct.Struct("<Q16s16s32s16sH128s")
CHECKSUM = 16  # bytes of a checksum
# Threads that read, write and check pages: hashing a page takes about as long as reading it.
THREADS = 4
# Names of the files of pages: whatever else lies in the folder is somebody's.
OWN = re.compile(r"\d+\.(pages|records)")
MAGIC = b"kvasir pages 1\n"


@dataclass(frozen=True, slots=True)
class Config:
    """``path``: the folder. ``bytes``: most bytes of its files. ``key``: the secret; "": one kept in the folder."""

    path: str = ""
    bytes: int = 0
    key: str = ""


class Disk(Tier):
    lasting = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not config.path:
            raise ConfigError("disk:path= names no folder. Give --kv-disk PATH,bytes=N")
        self._folder = Path(config.path).expanduser()
        self._lock = -1
        self._files: list[tuple[int, int]] = []  # of pages and of records, by group
        self._secret = b""
        self._writes = 0  # so far; a record has the number of its own
        self._threads: ThreadPoolExecutor | None = None

    def open(self, place: Place) -> list[Found]:
        if place.device.type == "cuda" and place.above is None:
            raise ConfigError(
                "--kv-disk on a GPU passes pages through host memory. Leave out --kv-host-bytes 0, or --kv-disk."
            )
        self._sizes = place.page_bytes
        self._slots = place.pool.page_slots
        self._record = HEAD.size + 8 * self._slots + CHECKSUM
        self.num_slots = place.slots_in(self.config.bytes, [self._record] * len(self._sizes))
        if not all(self.num_slots):
            raise ConfigError(
                f"--kv-disk bytes={self.config.bytes} does not hold a page of every cache group. Give "
                f"{2 * sum(self._sizes)} bytes or more."
            )
        check_folder(self._folder, "--kv-disk")
        self._take_lock()
        try:
            self._secret = self._find_secret()
            self._threads = ThreadPoolExecutor(THREADS, "kvasir-disk")
            return self._open_files(place)
        except BaseException:
            self.close()
            raise

    @property
    def secret(self) -> bytes | None:
        return self._secret

    def links(self, place: Place) -> tuple[Link, Link]:
        return ThreadLink("disk-write"), ThreadLink("disk-read")

    # --------------------------------------------------------------------------------------------------------- folder

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = -1
            raise ConfigError(
                f"--kv-disk: {self._folder} is in use by another process (pid {owner}). Stop that process, or name "
                "another folder."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _find_secret(self) -> bytes:
        """The key of checksums and of the prefix index, 32 bytes."""
        if self.config.key:
            return blake2b(self.config.key.encode(), digest_size=32, person=b"kvasir-disk").digest()
        path = self._folder / "key"
        with contextlib.suppress(OSError):
            if len(found := path.read_bytes()) == 32:
                return found
        replace(path, fresh := os.urandom(32), private=True)
        return fresh

    def _open_files(self, place: Place) -> list[Found]:
        """Open the files; return what they hold if weights, settings, sizes and secret are those of now."""
        shape = repr((self._slots, self._sizes, self.num_slots)).encode()
        head = MAGIC + blake2b(place.root + shape, key=self._secret, digest_size=32).digest()
        path, known = self._folder / "head", b""
        with contextlib.suppress(OSError):
            known = path.read_bytes()
        if known and known != head:
            log.warning(
                "%s holds pages of other weights, settings, sizes or another --kv-disk-key: they are deleted",
                self._folder,
            )
        if known != head:
            for old in self._folder.iterdir():
                if OWN.fullmatch(old.name):
                    old.unlink()
            replace(path, head, private=True)
        found: list[tuple[int, Found]] = []
        for group in range(len(self._sizes)):
            pages, records = [
                os.open(self._folder / f"{group}.{kind}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                for kind in ("pages", "records")
            ]
            self._files.append((pages, records))
            found += self._read_records(group)
        found.sort(key=lambda entry: entry[0])
        self._writes = found[-1][0] if found else 0
        return [page for _, page in found]

    def _read_records(self, group: int) -> list[tuple[int, Found]]:
        """The whole records of a group with the numbers of their writes; the newest of each page."""
        with open(os.dup(self._files[group][1]), "rb") as file:
            file.seek(0)
            raw = file.read(self.num_slots[group] * self._record)
        newest: dict[bytes, tuple[int, Found]] = {}
        for slot in range(len(raw) // self._record):
            record = raw[slot * self._record : (slot + 1) * self._record]
            if (entry := self._parsed(record, group, slot)) is not None:
                number, page = entry
                if page.key not in newest or newest[page.key][0] < number:
                    newest[page.key] = entry
        return list(newest.values())

    def _parsed(self, record: bytes, group: int, slot: int) -> tuple[int, Found] | None:
        body, checksum = record[:-CHECKSUM], record[-CHECKSUM:]
        if self._sum(body, b"%d %d" % (group, slot)) != checksum:
            return None
        number, key, before, tenant, _, length, variant = HEAD.unpack_from(body)
        tokens = array("q", body[HEAD.size :]).tolist()
        is_first = tenant != bytes(32)
        return number, Found(key, before, tokens, variant[:length].decode(), tenant if is_first else b"", group, slot)

    # ---------------------------------------------------------------------------------------------------------- pages

    def _sum(self, data: bytes | memoryview, about: bytes) -> bytes:
        digest = blake2b(about, key=self._secret, digest_size=CHECKSUM)
        digest.update(data)
        return digest.digest()

    def write(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        memory = rows.numpy()
        start, self._writes = self._writes, self._writes + len(moves)

        def one(number: int, move: Move) -> OSError | None:
            page = memoryview(memory[move.row])
            try:
                self._write(group, move, page, start + number)
            except OSError as error:
                return error
            return None

        errors = list(self._threads.map(one, range(1, len(moves) + 1), moves))
        if (error := next((e for e in errors if e is not None), None)) is not None:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            log.warning("--kv-disk: %d pages were not stored in %s: %s", sum(map(bool, errors)), self._folder, why)
        return [error is None for error in errors]

    def _write(self, group: int, move: Move, page: memoryview, number: int) -> None:
        pages, records = self._files[group]
        named: StoredPage = move.page
        before = named.parent
        variant = named.variant.encode()
        if before is None or len(variant) > 128:
            raise OSError(errno.EINVAL, "the name of the page's variant is longer than 128 bytes")
        tenant = bytes(32)
        if before.parent is None:
            known = before.tokens[0]
            tenant = known if isinstance(known, bytes) else tenant_digest(self._secret, known)
        checksum = self._sum(page, named.key + bytes([group]))
        body = HEAD.pack(number, named.key, before.key, tenant, checksum, len(variant), variant)
        body += array("q", named.tokens).tobytes()
        place = b"%d %d" % (group, move.slot)
        _write_all(pages, page, move.slot * self._sizes[group])
        _write_all(records, body + self._sum(body, place), move.slot * self._record)

    def read(self, group: int, rows: torch.Tensor, moves: Sequence[Move]) -> list[bool]:
        memory = rows.numpy()

        def one(move: Move) -> bool:
            try:
                return self._read(group, move, memoryview(memory[move.row]))
            except OSError as error:
                log.warning("--kv-disk: a page of %s cannot be read: %s", self._folder, error.strerror)
                return False

        return list(self._threads.map(one, moves))

    def _read(self, group: int, move: Move, page: memoryview) -> bool:
        """Read a page and compare it with its record, which must name the page that is asked for."""
        pages, records = self._files[group]
        body = os.pread(records, self._record - CHECKSUM, move.slot * self._record)
        if len(body) < HEAD.size:
            return False
        _, key, _, _, checksum, _, _ = HEAD.unpack_from(body)
        size, done = self._sizes[group], 0
        while done < size:
            if not (count := os.preadv(pages, [page[done:]], move.slot * size + done)):
                return False  # the file was cut
            done += count
        return key == move.page.key and self._sum(page, key + bytes([group])) == checksum

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for handle in (handle for files in self._files for handle in files):
            os.close(handle)
        self._files = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _write_all(handle: int, data: bytes | memoryview, at: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        if not (count := os.pwrite(handle, view[done:], at + done)):
            raise OSError(errno.EIO, "the file takes no more bytes")
        done += count
