"""Files of records survive full disks, torn writes and foreign bytes: only what was torn is lost, and that is told."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import records

LINES = [json.dumps({"n": n, "text": "ß" * n}, ensure_ascii=False).encode() for n in range(4)]


def read(path: Path) -> records.Reading:
    return records.read(path, json.loads)


def full_after(monkeypatch, room: int) -> None:
    """Let the disk take ``room`` bytes more."""
    write = os.write

    def some(handle: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(handle, bytes(data)[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", some)


def test_a_write_torn_at_any_byte_costs_only_its_record(tmp_path, caplog):
    """A kill leaves what was written. The record is whole only when at most its line break is missing."""
    path = tmp_path / "file"
    torn = LINES[3] + b"\n"
    for cut in range(len(torn)):
        path.unlink(missing_ok=True)
        records.append(path, LINES[:3])
        before = path.stat().st_size
        with path.open("ab") as file:
            file.write(torn[:cut])
        records.append(path, [b'{"n": 9}'])
        found = read(path)
        whole = cut == len(torn) - 1
        assert [r["n"] for r in found.records] == [0, 1, 2, *([3] if whole else []), 9], cut
        assert found.lost == ([] if whole or not cut else [(before, before + cut)]), cut
        caplog.clear()
        found.tell(path)
        told = [r.getMessage() for r in caplog.records]
        assert len(told) == len(found.lost) and all(f"bytes {before} to {before + cut}" in line for line in told)


@pytest.mark.parametrize("earlier", [b"", LINES[0] + b"\n", LINES[0], b'{"to'])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, earlier):
    path = tmp_path / "file"
    for room in range(len(LINES[1]) + 1):
        path.write_bytes(earlier)
        with monkeypatch.context() as patch:
            full_after(patch, room)
            with pytest.raises(OSError, match="No space"):
                records.append(path, LINES[1:3])
        assert path.read_bytes() == earlier, room
    records.append(path, LINES[2:])
    assert [r["n"] for r in read(path).records][-2:] == [2, 3]


def test_a_file_at_the_limit_of_the_system_is_cut_back(tmp_path):
    """The kernel's own limit, in a process of its own: part of the record is written, then EFBIG."""
    path = tmp_path / "file"
    code = (
        "import resource, signal, sys; from kvasir import records\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "records.append(sys.argv[1], [b'[1]'])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "try:\n    records.append(sys.argv[1], [b'[' + b'2' * 50 + b']'])\n"
        "except OSError as e:\n    print(e.strerror)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "records.append(sys.argv[1], [b'[3]'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "too large" in done.stdout and path.read_bytes() == b"[1]\n[3]\n"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY, "only the child was limited"


def test_a_failed_sync_is_a_failed_write(tmp_path, monkeypatch):
    path = tmp_path / "file"
    records.append(path, LINES[:1])
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
    with pytest.raises(OSError, match="input/output"):
        records.append(path, LINES[1:2])
    assert path.read_bytes() == LINES[0] + b"\n"


def test_what_another_wrote_behind_a_failed_write_stays(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write = os.write

    def failing(handle: int, data: bytes) -> int:
        write(handle, bytes(data)[:5])
        with path.open("ab") as other:
            other.write(b"\n" + LINES[2] + b"\n")
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        with pytest.raises(OSError):
            records.append(path, LINES[1:2])
    found = read(path)
    assert [r["n"] for r in found.records] == [2] and found.lost == [(0, 5)]


def test_when_a_failed_write_cannot_be_cut_off_the_next_record_stands_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with monkeypatch.context() as patch:
        full_after(patch, 5)
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(OSError, match="No space"):
            records.append(path, LINES[:1])
    records.append(path, LINES[1:2])
    found = read(path)
    assert [r["n"] for r in found.records] == [1] and found.lost == [(0, 5)]


@given(st.lists(st.binary(max_size=12), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_bytes_between_records_lose_no_record(tmp_path_factory, pieces):
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.unlink(missing_ok=True)
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece.replace(b"\n", b"\r"))
        records.append(path, [b'{"mine": 1}'])
    if pieces:
        found = read(path)
        assert found.records.count({"mine": 1}) == len(pieces)
        assert all(begin < end for begin, end in found.lost)


def test_what_was_lost_is_told_in_one_line(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_bytes(b'[1]\n\xff\xfe\n[2]\n{"half\n\0\0\0')
    read(path).tell(path)
    (line,) = caplog.records
    assert "bytes 4 to 6, 11 to 17, 18 to 21 cannot be read, so 3 records are lost" in line.getMessage()
    assert str(path) in line.getMessage()


def test_a_private_file_is_private_and_a_pipe_is_written_as_it_is(tmp_path):
    path = tmp_path / "file"
    path.touch(0o644)
    records.append(path, LINES[:1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError):
        records.append(link, LINES[:1])
    with records.RecordFile("/dev/null") as file:
        file.append(b"[1]")
