"""Tiers as stores: what comes back is what was written; a file that was cut, changed or mixed up is never served."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvasir import technique
from kvasir.client import page_keys
from kvasir.errors import ConfigError
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.kv.tier import TIERS, Move, Place, Tier, runs
from kvasir.types import CacheGroup, CacheRow

SLOTS = 4  # tokens of a page
GROUPS = [
    CacheGroup("full", (0, 1), (CacheRow(2, 8, 8),) * 2),
    CacheGroup("window", (2,), (CacheRow(2, 8, 8),), window=8),
]
BYTES = 20_000


@dataclass
class Page:
    """An entry of a prefix index, as tiers see it."""

    key: bytes
    tokens: list
    parent: Page | None = None
    variant: str = ""
    digest: object = field(default=None, repr=False)

    def child(self, tokens: list[int], variant: str = "") -> Page:
        return Page(page_keys.page_key(self.digest, self.key, tokens, variant), tokens, self, variant, self.digest)


def place(root: bytes = b"root", pages: int = 12) -> Place:
    pool = KVPool(GROUPS, technique.load(CODECS, "plain", Codec), [pages] * 2, SLOTS, "cpu", torch.float32)
    for rows in pool.pages:
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
    return Place(pool, torch.device("cpu"), root)


def tier(name: str, folder: Path, **options) -> Tier:
    given = {"bytes": BYTES} | ({"path": folder} if name == "disk" else {}) | options
    return technique.load(TIERS, f"{name}:" + ",".join(f"{k}={v}" for k, v in given.items()), Tier)


def root_of(found: Tier, tenant: str = "") -> Page:
    secret = found.secret or b"secret"

    def digest(data: bytes) -> bytes:
        return page_keys.keyed(secret, data)

    return Page(page_keys.tenant_key(digest, b"root", tenant), [tenant], digest=digest)


def chain(found: Tier, count: int = 4, tenant: str = "") -> list[Page]:
    pages = [root_of(found, tenant)]
    for i in range(count):
        pages.append(pages[-1].child(list(range(SLOTS * i, SLOTS * (i + 1))), "adapter" * (i == 2)))
    return pages[1:]


def store(found: Tier, at: Place, pages: list[Page], group: int = 0) -> list[Move]:
    moves = [Move(1 + i, len(pages) - 1 - i, page) for i, page in enumerate(pages)]
    assert found.write(group, at.pool.pages[group], moves) == [True] * len(pages)
    return moves


def served(found: Tier, at: Place, moves: list[Move], group: int = 0) -> list[bool]:
    """Read pages into other rows and return which were served. Each of those must be the page that was written."""
    rows = torch.zeros_like(at.pool.pages[group])
    good = found.read(group, rows, moves)
    for move, whole in zip(moves, good):
        assert not whole or rows[move.row].equal(at.pool.pages[group][move.row]), "other bytes are served"
    return good


@pytest.mark.parametrize("name", ["host", "disk"])
def test_pages_come_back_as_they_were(name, tmp_path):
    found, at = tier(name, tmp_path), place()
    assert found.open(at) == [] and all(found.num_slots) and found.ready
    size = sum(n * b for n, b in zip(found.num_slots, at.page_bytes))
    assert 0.7 * BYTES < size <= BYTES
    for group in range(2):
        assert served(found, at, store(found, at, chain(found), group), group) == [True] * 4
    found.close()


def test_pages_side_by_side_are_one_copy():
    page = Page(b"", [])
    moves = [Move(row, slot, page) for row, slot in [(5, 2), (3, 0), (4, 1), (7, 3), (8, 9)]]
    assert runs(moves) == [(3, 0, 3), (7, 3, 1), (8, 9, 1)]


@pytest.mark.parametrize("name", ["host", "disk"])
def test_a_tier_without_room_for_a_page_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"does not hold a page of every cache group\. Give"):
        tier(name, tmp_path, bytes=100).open(place())


# ----------------------------------------------------------------------------------------------------------- restarts


def reopened(folder: Path, root: bytes = b"root", **options) -> tuple[Tier, list]:
    found = tier("disk", folder, **options)
    return found, found.open(place(root))


def stored(folder: Path, **options) -> tuple[Place, list[Page], list[Move]]:
    found, at = tier("disk", folder, **options), place()
    found.open(at)
    pages = chain(found, tenant="t")
    moves = store(found, at, pages)
    found.close()
    return at, pages, moves


def test_a_restart_finds_the_pages(tmp_path):
    at, pages, moves = stored(tmp_path)
    found, listed = reopened(tmp_path)
    assert [(p.key, p.before, p.tokens, p.variant, p.slot) for p in listed] == [
        (page.key, page.parent.key, page.tokens, page.variant, move.slot) for page, move in zip(pages, moves)
    ]
    assert listed[0].tenant == page_keys.tenant_digest(found.secret, "t") and not any(p.tenant for p in listed[1:])
    assert served(found, at, moves) == [True] * 4
    found.close()


@pytest.mark.parametrize(
    "root, options", [(b"other weights", {}), (b"root", {"key": "another"}), (b"root", {"bytes": 30_000})]
)
def test_a_folder_of_others_is_begun_anew(root, options, tmp_path, caplog):
    stored(tmp_path)
    others = [tmp_path / "my.records", tmp_path / "book.pages"]
    for file in others:
        file.write_text("of the user")
    found, listed = reopened(tmp_path, root, **options)
    assert listed == [] and "they are deleted" in caplog.text
    assert all(file.read_text() == "of the user" for file in others), "only the tier's own files are deleted"
    found.close()


def test_a_key_of_the_user_makes_the_pages_readable_with_it_alone(tmp_path):
    stored(tmp_path, key="mine")
    assert not (tmp_path / "key").exists()
    found, listed = reopened(tmp_path, key="mine")
    assert len(listed) == 4
    found.close()


def test_a_folder_in_use_is_refused(tmp_path):
    code = (
        "import fcntl, os, sys\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(str(os.getpid()))\nfile.flush()\nprint(flush=True)\nsys.stdin.read()"
    )
    tmp_path.joinpath("lock").touch()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match=rf"in use by another process \(pid {other.pid}\)\. Stop that process"):
            reopened(tmp_path)
        other.kill()
        other.wait()
    reopened(tmp_path)[0].close()


# ------------------------------------------------------------------------------------------------------------- damage


def files(folder: Path) -> list[Path]:
    return [folder / "0.pages", folder / "0.records"]


@pytest.mark.parametrize("kind", [0, 1], ids=["pages", "records"])
def test_a_file_cut_at_any_byte_is_never_served(kind, tmp_path):
    at, _, moves = stored(tmp_path)
    file = files(tmp_path)[kind]
    whole, rng = file.read_bytes(), random.Random(0)
    cuts = sorted({0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 60)})
    counts = []
    for cut in cuts:
        file.write_bytes(whole[:cut])
        found, listed = reopened(tmp_path)
        known = {page.key for page in listed}
        good = served(found, at, [move for move in moves if move.page.key in known])
        counts.append(sum(good))
        found.close()
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 3


@pytest.mark.parametrize("kind", [0, 1], ids=["pages", "records"])
def test_a_file_with_one_byte_changed_is_never_served(kind, tmp_path):
    """Every byte in turn costs exactly the page that it belongs to, at a restart and while the file is in use."""
    at, _, moves = stored(tmp_path)
    file = files(tmp_path)[kind]
    whole, rng = file.read_bytes(), random.Random(1)
    size = len(whole) // 4
    for place_ in {0, len(whole) - 1, *rng.sample(range(len(whole)), 60)}:
        changed = bytearray(whole)
        changed[place_] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        found, listed = reopened(tmp_path)
        known = {page.key for page in listed}
        good = [move.page.key in known and served(found, at, [move])[0] for move in moves]
        assert good == [move.slot != place_ // size for move in moves]
        found.close()


def test_pages_that_changed_places_are_not_served(tmp_path):
    """Each checksum covers the prefix key, the group and the slot of the record."""
    at, _, moves = stored(tmp_path)
    pages, records = files(tmp_path)
    whole, size = pages.read_bytes(), at.page_bytes[0]
    pages.write_bytes(whole[size : 2 * size] + whole[:size] + whole[2 * size :])
    found, _ = reopened(tmp_path)
    assert served(found, at, moves) == [move.slot > 1 for move in moves]
    found.close()
    lines, size = records.read_bytes(), len(records.read_bytes()) // 4
    records.write_bytes(lines[size : 2 * size] + lines[:size] + lines[2 * size :])
    found, listed = reopened(tmp_path)
    assert sorted(page.slot for page in listed) == [2, 3]
    found.close()


def test_a_slot_written_over_is_not_served_for_its_old_page(tmp_path):
    found, at = tier("disk", tmp_path), place()
    found.open(at)
    pages = chain(found)
    store(found, at, pages[:1])
    found.write(0, at.pool.pages[0], [Move(2, 0, pages[1])])
    assert found.read(0, torch.zeros_like(at.pool.pages[0]), [Move(1, 0, pages[0])]) == [False]
    assert found.read(0, at.pool.pages[0], [Move(3, 0, pages[1])]) == [True]
    found.close()


@pytest.mark.parametrize("room", [0, 300, 2000])
def test_a_full_disk_costs_the_pages_that_did_not_fit(room, tmp_path, monkeypatch, caplog):
    at, pages, moves = stored(tmp_path)
    found, _ = reopened(tmp_path)
    write, left, taking = os.pwrite, room, threading.Lock()

    def some(handle: int, data: bytes, offset: int) -> int:
        nonlocal left
        with taking:
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = write(handle, bytes(data)[:left], offset)
            left -= done
            return done

    monkeypatch.setattr(os, "pwrite", some)
    more = [page.child([7] * SLOTS) for page in pages]
    newer = [Move(5 + i, 4 + i, page) for i, page in enumerate(more)]
    good = found.write(0, at.pool.pages[0], newer)
    assert not all(good) and "the disk is full" in caplog.text
    monkeypatch.undo()
    assert served(found, at, moves) == [True] * 4, "what was stored before stays"
    assert [move for move, whole in zip(newer, good) if whole and not served(found, at, [move])[0]] == []
    assert found.write(0, at.pool.pages[0], newer) == [True] * 4
    found.close()


def test_no_copy_crosses_the_end_of_a_pinned_piece(tmp_path, monkeypatch):
    """CUDA refuses such copies: 64 GiB of 2 MiB pages lost one batch of pages at the end of each GiB."""
    at = place()
    size = at.page_bytes[0]
    monkeypatch.setattr("kvasir.kv.tiers.host.PIECE", 3 * size + size // 2)
    found = tier("host", tmp_path, bytes=20 * sum(at.page_bytes))
    found.open(at)
    pages = chain(found, 9)
    moves = [Move(1 + i, 2 + i, page) for i, page in enumerate(pages)]
    copies = list(found._copies(0, moves))
    assert copies == [(1, 2, 1), (2, 3, 3), (5, 6, 3), (8, 9, 2)]
    assert all(slot // 3 == (slot + count - 1) // 3 for _, slot, count in copies)
    assert runs(moves) == [(1, 2, 9)], "without the pieces it is one copy"
    found.write(0, at.pool.pages[0], moves)
    assert served(found, at, moves) == [True] * 9
    found.close()


def test_a_disk_on_a_gpu_needs_host_memory(tmp_path):
    at = place()
    with pytest.raises(ConfigError, match="passes pages through host memory. Leave out --kv-host-bytes 0"):
        tier("disk", tmp_path).open(Place(at.pool, torch.device("cuda"), b"root"))
