"""Every file that the package appends to: under a full disk, torn at any byte, and where nothing can be written. What
was written before stays, what is lost is told once, and the next reader starts all the same."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvasir import records
from kvasir.api.protocols.responses_journal import ResponseJournal
from kvasir.api.scaling.scaling_store import RunStore
from kvasir.bench import result
from kvasir.cli import batch, generate
from kvasir.cli import main as cli
from kvasir.cli.chat import Conversation
from kvasir.cli.options import check_output
from kvasir.client import journal
from kvasir.errors import ConfigError
from kvasir.scaling.journal import Journal
from kvasir.types import Request, SamplingParams
from kvasir_lab.cells import keep_cell, read_cells
from tests.test_records import full_after

FAILED = (OSError, ConfigError)


@dataclass(frozen=True)
class Kind:
    """A kind of file. ``write`` appends the record of number n as the product does. ``read`` returns the numbers of the
    records as the next process finds them."""

    write: Callable[[Path, int], Any]
    read: Callable[[Path], list[int]]


def write_request(path: Path, n: int) -> None:
    journal.write(path, [Request(id=f"{n}", prompt_ids=[1, n], params=SamplingParams(), max_tokens=3, seed=n)])


def response_journal(path: Path, work: Callable[[ResponseJournal], Any]) -> Any:
    server = ResponseJournal(str(path))
    try:
        return work(server)
    finally:
        server.close()


def write_response(path: Path, n: int) -> None:
    record = dict(id=f"{n}", owner="", tenant="", created=1.0, model="m", seed=n, items=[], body={"input": "ß"})
    response_journal(path, lambda server: server.begin(record))


def write_call(path: Path, n: int) -> None:
    calls = Journal(path, {"strategy": "majority"})
    try:
        calls.add(f"{n}", "request", ["reply ß"], None)
    finally:
        calls.close()


def read_calls(path: Path) -> list[int]:
    calls = Journal(path, {"strategy": "majority"})
    try:
        return [n for n in range(9) if calls.find(f"{n}", "request")]
    finally:
        calls.close()


def write_row(path: Path, n: int) -> None:
    with batch._opened(path) as file:
        response = {"status_code": 200, "request_id": "r", "body": {"text": "ß"}}
        batch._write(file, {"id": f"batch_req_{n}", "custom_id": f"{n}", "response": response, "error": None})


KINDS = {
    "journal of requests": Kind(write_request, lambda path: [int(r.id) for r in journal.load(path)]),
    "stored responses": Kind(
        write_response, lambda path: [int(name) for name in response_journal(path, lambda server: server.load()[0])]
    ),
    "calls of a scaling run": Kind(write_call, read_calls),
    "output of a batch": Kind(write_row, lambda path: sorted(map(int, batch._answered(path)))),
    "cells of a study": Kind(
        lambda path, n: keep_cell(path, (n, "arm"), {"right": "01"}), lambda path: [n for n, _ in read_cells(path)]
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def record_of(kind: Kind, path: Path, n: int) -> bytes:
    """The bytes that the record of number ``n`` adds to the file."""
    size = path.stat().st_size
    kind.write(path, n)
    found = path.read_bytes()[size:]
    os.truncate(path, size)
    return found


@each_kind
def test_a_full_disk_leaves_what_was_there_and_the_next_write_goes_on(kind, tmp_path, monkeypatch):
    path = tmp_path / "file"
    kind.write(path, 1)
    before, more = path.read_bytes(), record_of(kind, path, 2)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # hundreds of them take a slow disk minutes
    for room in range(len(more)):
        with monkeypatch.context() as patch:
            full_after(patch, room)
            with pytest.raises(FAILED, match="No space left"):
                kind.write(path, 2)
        assert path.read_bytes() == before, room
    kind.write(path, 3)
    assert kind.read(path) == [1, 3]
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


@each_kind
def test_a_record_torn_at_any_byte_costs_only_itself_and_is_told_once(kind, tmp_path, monkeypatch, caplog):
    path = tmp_path / "file"
    kind.write(path, 1)
    before, more = path.read_bytes(), record_of(kind, path, 2)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for cut in range(len(more)):
        path.write_bytes(before + more[:cut])
        caplog.clear()
        whole = cut == len(more) - 1  # but for the line break
        assert kind.read(path) == ([1, 2] if whole else [1]), cut
        told = [r.getMessage() for r in caplog.records]
        assert len(told) == (0 < cut < len(more) - 1) and all("1 record is lost" in line for line in told), (cut, told)
        kind.write(path, 3)
        assert kind.read(path) == ([1, 2, 3] if whole else [1, 3]), cut


@each_kind
def test_the_first_record_torn_at_any_byte_keeps_no_server_from_starting(kind, tmp_path, monkeypatch):
    path = tmp_path / "file"
    kind.write(path, 1)
    whole = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for cut in range(len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert kind.read(path) == [], cut
        kind.write(path, 3)
        assert kind.read(path) == [3], cut


def test_a_full_disk_leaves_whole_rows_of_generate_and_no_torn_conversation(tmp_path, monkeypatch):
    """Every row that `kvasir generate -o` wrote can be read, and `/save` leaves no file."""
    path, talk = tmp_path / "out.jsonl", Conversation(Console(file=io.StringIO()), None, [])
    for room in range(60):
        path.unlink(missing_ok=True)
        with monkeypatch.context() as patch, records.RecordFile(path) as file:
            full_after(patch, room)
            with pytest.raises(OSError, match="No space left"):
                answers = generate.Answers(file.append, 9)
                for n in range(9):
                    answers.put(n, text="ß\ud800")
            talk.save(str(tmp_path / "talk.jsonl"))
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert [row["index"] for row in rows] == list(range(len(rows)))
        assert [f.name for f in tmp_path.iterdir()] == ["out.jsonl"]
    talk.save(str(tmp_path / "talk.jsonl"))
    assert json.loads((tmp_path / "talk.jsonl").read_text()) == {"messages": []}


def test_a_device_that_is_full_fails_each_write():
    with records.RecordFile("/dev/full") as file:
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                file.append(b"[1]")


def test_a_pipe_that_nobody_reads_stops_nobody(tmp_path):
    """Opening it for writing would wait for ever: it runs in a thread, which a reader then frees."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (records.RecordFile, check_output):
        found: list[BaseException] = []
        thread = threading.Thread(target=lambda write=write, found=found: _raised(write, pipe, found), daemon=True)
        thread.start()
        thread.join(10)
        waits = thread.is_alive()
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        thread.join()
        assert not waits and "Nobody reads this pipe" in str(found[0])
        with records.RecordFile(pipe) as file:  # the reader is there
            file.append(b"[1]")
        assert os.read(reader, 9) == b"[1]\n"
        os.close(reader)


def _raised(write: Callable[[Path], object], path: Path, found: list[BaseException]) -> None:
    try:
        write(path)
    except (OSError, ConfigError) as e:
        found.append(e)


# ------------------------------------------------------------------------------------------- files that are replaced


def test_a_full_disk_never_costs_the_result_that_was_there(tmp_path, monkeypatch):
    """A benchmark writes its result after each arm; a study of hours must not end with half a file."""
    path = tmp_path / "result.json"
    result.save({"arms": [1]}, path)
    before = path.read_bytes()
    for room in range(len(before)):
        with monkeypatch.context() as patch:
            full_after(patch, room)
            with pytest.raises(OSError, match="No space left"):
                result.save({"arms": [1, 2]}, path)
        assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["result.json"], room
    result.save({"arms": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"arms": [1, 2]}


def test_a_replaced_file_keeps_its_rights_its_links_and_its_place(tmp_path, monkeypatch):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    records.replace(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    records.replace(tmp_path / "mine", b"new", private=True)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    records.replace("/dev/null", b"new")
    assert not os.path.isfile("/dev/null"), "a device is written, not replaced"

    def no_new_file(name: Any, *more: Any, open_file: Any = os.open, **options: Any) -> int:
        if str(name).endswith(".new"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(name, *more, **options)

    monkeypatch.setattr(os, "open", no_new_file)
    records.replace(path, b"newer")
    assert path.read_bytes() == b"newer", "a file may be writable in a folder that is not"
    with pytest.raises(PermissionError):
        records.replace(tmp_path / "other", b"new")


def test_a_full_disk_ends_a_command_with_one_line(tmp_path, monkeypatch, capsys):
    def write(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "out"))

    monkeypatch.setattr(cli, "app", write)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1
    assert f"cannot write {tmp_path / 'out'}: No space left on device. Make room" in told
    monkeypatch.setattr(cli, "app", lambda **_: (_ for _ in ()).throw(OSError(errno.ECONNREFUSED, "refused")))
    with pytest.raises(OSError, match="refused"):
        cli.main()


# ------------------------------------------------------------------------------------- places that cannot be written


REFUSED = {
    "--journal": lambda folder: ResponseJournal(str(folder / "journal")),
    "--scaling-runs": lambda folder: RunStore(folder / "runs"),
    "--crash-dumps": lambda folder: records.check_folder(folder / "dumps", "--crash-dumps"),
    "--learn-out": lambda folder: records.check_folder(folder / "learned", "--learn-out"),
    "cells": lambda folder: read_cells(folder / "study.cells.jsonl"),
    "batch": lambda folder: batch._opened(folder / "out.jsonl").__enter__(),
    "cannot write": lambda folder: check_output(folder / "out.json", make=True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_place_that_cannot_be_written_is_refused_by_name_with_a_fix(what, tmp_path):
    """A path below a file: nobody can write there, not even the superuser."""
    place = tmp_path / "file"
    place.write_bytes(b"")
    with pytest.raises(ConfigError) as refused:
        REFUSED[what](place)
    told = str(refused.value)
    assert str(place) in told and ("Not a directory" in told or "File exists" in told)
    assert what == "batch" or (what in told and "Name a" in told), told
    assert place.read_bytes() == b"" and [f.name for f in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["--journal", "--crash-dumps", "--learn-out", "cannot write"])
def test_a_full_disk_is_told_at_the_start(what, tmp_path, monkeypatch):
    """A full disk still opens files, so each place is tried with a block that is cut off again."""
    with monkeypatch.context() as patch:
        full_after(patch, 100)
        with pytest.raises(ConfigError) as refused:
            REFUSED[what](tmp_path)
    told = str(refused.value)
    assert what in told and str(tmp_path) in told and "No space left on device" in told and "has room" in told
    assert not [file for file in tmp_path.iterdir() if file.is_file()]


@pytest.mark.parametrize("end", [b"\n", b"", b'\n{"record":"beg'])
def test_trying_a_journal_for_room_leaves_it_as_it_was(end, tmp_path, monkeypatch):
    path = tmp_path / "journal"
    write_response(path, 1)
    held = path.read_bytes().rstrip(b"\n") + end
    path.write_bytes(held)
    for room in (0, 100, records.TRIED_BYTES):
        with monkeypatch.context() as patch:
            full_after(patch, room)
            if room < records.TRIED_BYTES:
                with pytest.raises(ConfigError, match="No space left"):
                    ResponseJournal(str(path))
        assert path.read_bytes() == held
    for work in (lambda: ResponseJournal(str(path)).close(), lambda: check_output(path)):
        work()
        assert path.read_bytes() == held, "the next server can lock it"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no namespaces")
def test_a_file_system_that_is_mounted_read_only_is_refused_as_well(tmp_path):
    """The kernel's own refusal, where this user may mount: in a namespace of its own."""
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from tests.test_full_disks import REFUSED\n"
        "for what, work in REFUSED.items():\n"
        "    try:\n        work(Path(sys.argv[1]))\n"
        "    except Exception as e:\n        print(what, type(e).__name__, str(e).replace(chr(10), ' '))\n"
    )
    mounted = f'mount -t tmpfs -o ro tmpfs "{tmp_path}" || exit 77; exec "$0" -c "$1" "{tmp_path}"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, sys.executable, code],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"this user cannot mount: {done.stderr[-200:]}")
    told = done.stdout.splitlines()
    assert len(told) == len(REFUSED) and all("ConfigError" in line and "Read-only" in line for line in told), told
