"""Studies side by side: each ends by its time, and the list of what a GPU has to measure fits its minutes."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import runpy
import shlex
import signal
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import typer

from kvasir.cli.main import app
from kvasir.errors import ConfigError
from tools import side_by_side

LISTS = sorted(Path(side_by_side.__file__).parent.glob("*_gpu.toml"))
STUDIES = """
[[together]]
name = "short"
seconds = 9
command = "echo told > OUT/short.txt"
[[together]]
name = "long"
seconds = 0.3
command = "echo part > OUT/long.txt; sleep 30; echo whole > OUT/long.txt"
[[together]]
name = "wrong"
seconds = 9
command = "exit 3"
[[alone]]
name = "first"
seconds = 9
command = "cat OUT/short.txt"
"""


def test_studies_end_by_their_time_and_keep_what_they_wrote(tmp_path):
    file, out = tmp_path / "list.toml", tmp_path / "out"
    file.write_text(STUDIES)
    assert side_by_side.main([str(file), str(out), "--part", "together"]) == 1
    told = {one["name"]: one for one in json.loads((out / "together.status.json").read_text())}
    assert {name: one["how"] for name, one in told.items()} == {"short": "done", "long": "cut off", "wrong": "failed"}
    assert told["wrong"]["status"] == 3
    assert told["long"]["took"] >= 0.3 == told["long"]["seconds"], "what it took, and what it was given"
    assert (out / "long.txt").read_text() == "part\n"
    assert side_by_side.main([str(file), str(out), "--part", "alone"]) == 0
    assert (out / "first.log").read_text() == "told\n"
    assert side_by_side.main([str(file), str(out), "--part", "alone", "--seconds", "0"]) == 0
    assert [one["how"] for one in json.loads((out / "alone.status.json").read_text())] == ["no time left"]
    with pytest.raises(ConfigError, match="--part third: .* has together, alone"):
        side_by_side.main([str(file), str(out), "--part", "third"])
    with pytest.raises(ConfigError, match="--only second: .* has first in alone"):
        side_by_side.main([str(file), str(out), "--part", "alone", "--only", "second"])


LANES = """
[[one]]
name = "waits"
seconds = 20
after = "OUT/ready"
command = "echo $CUDA_VISIBLE_DEVICES > OUT/waits.txt"
[[one]]
name = "next"
seconds = 20
command = "cat OUT/waits.txt"
[[two]]
name = "makes"
gpu = "1"
seconds = 20
command = "test ! -e OUT/waits.txt && echo $CUDA_VISIBLE_DEVICES > OUT/ready"
[[never]]
name = "forever"
seconds = 20
after = "OUT/nothing"
command = "true"
"""


def test_lanes_run_at_the_same_time_with_gpus_of_their_own(tmp_path, monkeypatch):
    """The first lane waits for a file of the second, and so it would never end if lanes ran one after the other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    file, out = tmp_path / "list.toml", tmp_path / "out"
    file.write_text(LANES)
    assert side_by_side.main([str(file), str(out), "--part", "one", "two"]) == 0
    assert (out / "ready").read_text() == "1\n"
    assert (out / "next.log").read_text() == "0,1\n"
    told = json.loads((out / "one.status.json").read_text())
    assert [one["how"] for one in told] == ["done", "done"]


def test_a_file_that_never_comes_does_not_hold_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "LEAST", 0.1)
    file, out = tmp_path / "list.toml", tmp_path / "out"
    file.write_text(LANES)
    assert side_by_side.main([str(file), str(out), "--part", "never", "--seconds", "0.5"]) == 0
    assert json.loads((out / "never.status.json").read_text())[0]["how"] == "no time left"


def test_a_part_alone_takes_the_gpus_that_are_there(tmp_path, monkeypatch):
    file, out = tmp_path / "list.toml", tmp_path / "out"
    file.write_text(LANES)
    monkeypatch.setattr(side_by_side, "gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="makes needs GPU 1, and GPUs here are numbered 0 to 0: run fewer parts"):
        side_by_side.main([str(file), str(out), "--part", "one", "two"])
    assert side_by_side.main([str(file), str(out), "--part", "two"]) == 0
    assert (out / "ready").read_text() == "0\n"
    file.write_text(LANES.replace('gpu = "1"', 'gpu = "0,1"'))
    with pytest.raises(ConfigError, match="makes needs GPU 0,1"):
        side_by_side.main([str(file), str(out), "--part", "two"])


@pytest.mark.parametrize("where", ["after", "command"])
def test_a_variable_that_is_not_set_is_refused_at_once(where, tmp_path, monkeypatch):
    monkeypatch.delenv("SITE", raising=False)
    study = {"after": "OUT", "command": "true OUT"} | {where: "$SITE/ready ${OTHER:-none}"}
    file = tmp_path / "list.toml"
    file.write_text("[[one]]\nname = 'peer'\nseconds = 9\n" + "".join(f"{k} = '{v}'\n" for k, v in study.items()))
    with pytest.raises(ConfigError, match="peer needs the environment variable SITE"):
        side_by_side.main([str(file), str(tmp_path / "out"), "--part", "one"])
    assert not (tmp_path / "out").exists()


def test_kvasir_runs_this_tree_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(side_by_side.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").symlink_to(sys.base_prefix + "/bin/python3")
    file, out = tmp_path / "list.toml", tmp_path / "out"
    command = "kvasir --version > OUT/version.txt"
    file.write_text(f"[[one]]\nname = 'version'\nseconds = 99\ncommand = '{command}'\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(typer.__file__).parents[1]))
    assert side_by_side.main([str(file), str(out), "--part", "one"]) == 0, (out / "version.log").read_text()
    assert (out / "version.txt").read_text().strip()


SERVES = """
import os, signal, subprocess, sys, time
def leave(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + "/pid", "w").write(str(server.pid))
try:
    time.sleep(600)
finally:
    time.sleep(float(sys.argv[2]))
    server.kill()
    open(sys.argv[1] + "/ended", "w").write("in order")
"""


@pytest.mark.parametrize("needs, in_order", [(0.5, True), (600, False)])
def test_a_command_that_is_cut_ends_its_servers_or_they_are_ended(needs, in_order, tmp_path, monkeypatch):
    """The server has a process group of its own, as those of the benchmarks have; the shell ends at once. Time is over
    when the server runs."""
    monkeypatch.setattr(side_by_side, "GRACE", 20.0 if in_order else 0.5)
    file, out, script = tmp_path / "list.toml", tmp_path / "out", tmp_path / "serves.py"
    script.write_text(SERVES)
    command = f"""

python {script} OUT {needs} \\
  && true
"""
    real = time.monotonic
    monkeypatch.setattr(side_by_side.time, "monotonic", lambda: real() + 1000 * (out / "pid").exists())
    file.write_text(f'[[one]]\nname = "serves"\nseconds = 900\ncommand = """{command}"""\n')
    side_by_side.main([str(file), str(out), "--part", "one", "--seconds", "900"])
    assert (out / "ended").exists() == in_order
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((out / "pid").read_text())).status() == psutil.STATUS_ZOMBIE
    assert json.loads((out / "one.status.json").read_text())[0]["how"] == "cut off"


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_every_study_of_a_list_ends_within_ten_minutes(file):
    told = tomllib.loads(file.read_text())
    for part, studies in side_by_side.read(file, list(told), "").items():
        assert len({study.name for study in studies}) == len(studies), part
        assert all(study.seconds <= 570 for study in studies)
        writes = [study for study in studies if not study.name.startswith("tests-")]
        assert all("OUT/" in study.command or "OUT " in study.command for study in writes)


class Parsed(Exception):
    """A command's options were read, and it would begin its work."""


def parts_of(command: str) -> list[list[str]]:
    """The commands of a shell line, each as its words."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars="&|;\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;\n"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def read_options(words: list[str], monkeypatch) -> None:
    """Let a command read its options, and stop it there. An option that it refuses fails the test, and so does a file
    of this project that is not there."""
    words = list(itertools.dropwhile(lambda word: word.split("=")[0].isupper(), words))  # variables of its environment
    files = [word for word in words if word.startswith(("bench/", "tests/", "tools/"))]
    assert all((side_by_side.ROOT / file).exists() for file in files), words
    if words[0] == "kvasir":
        command = typer.main.get_command(app)
        words = words[1:]
        while hasattr(command, "commands"):
            command, words = command.get_command(None, words[0]), words[1:]
        command.make_context("kvasir", list(words))
        return
    if words[:3] == ["python", "-m", "pytest"] or words[0] != "python":
        assert files or words[0] == "test"
        return
    as_module = words[1] == "-m"
    tool, arguments = (words[2], words[3:]) if as_module else (words[1], words[2:])

    def parse(parser, given=None, namespace=None):
        real(parser, arguments if given is None else given, namespace)
        raise Parsed

    real = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [tool, *arguments])
        patch.setattr(signal, "signal", lambda *_: None)  # some tools set one first, which would stay
        with pytest.raises(Parsed):
            if as_module:
                runpy.run_module(tool, run_name="__main__")
            else:
                runpy.run_path(str(side_by_side.ROOT / tool), run_name="__main__")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # some tests import the tools, too
@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_every_command_of_a_list_has_options_that_exist(file, monkeypatch, capsys):
    for studies in side_by_side.read(file, list(tomllib.loads(file.read_text())), "").values():
        for study in studies:
            for words in parts_of(study.command):
                try:
                    read_options(words, monkeypatch)
                except SystemExit as error:
                    pytest.fail(f"{study.name}: {' '.join(words)}: {error}; {capsys.readouterr().err[-500:]}")
