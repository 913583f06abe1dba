"""Commands in README.md and docs/ run as written: quick ones with every commit, slow ones with `make test-all`.

The rest stand in a list with the reason, and all that are ours are read by the command line."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from kvasir.cli.main import app
from kvasir_lab.study import Study
from tests.cli.conftest import kvasir  # noqa: F401  the fixture
from tests.integration.serving import Served
from tests.page_commands import ROOT, blocks, commands, of_pages

LISTS = tomllib.loads((ROOT / "tests" / "page_commands.toml").read_text())
NOT_RUN = {command: reason for reason, listed in LISTS.pop("not_run").items() for command in listed}
SHOWN = {command: page for page, listed in of_pages().items() for command in listed}
# What the pages leave to the reader.
STAND_INS = {"path/to/checkpoint": "nano", "MODEL": "nano", "SMALL": "nano", "FOLDER": "folder"}
OWN = [command for command in SHOWN if command.startswith("kvasir ")]
REQUESTS = '{"prompt": "Once upon a time", "max_tokens": 8}\n{"prompt": "There was", "max_tokens": 8}\n'
SECONDS = 900


def filled(command: str) -> list[str]:
    """The words of a command with our models in place of the reader's."""
    for word, ours in STAND_INS.items():
        command = re.sub(rf"(?<![\w/]){word}(?![\w/])", ours, command)
    return shlex.split(command)


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    words = filled(command)
    program = {"kvasir": [sys.executable, "-m", "kvasir"], "python": [sys.executable]}[words[0]]
    return subprocess.run([*program, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=SECONDS)


# -------------------------------------------------------------------------------------------------------- every command


def test_every_command_is_run_or_listed_with_a_reason():
    listed = collections.Counter([*(c for commands in LISTS.values() for c in commands), *NOT_RUN])
    assert not (new := [f"{SHOWN[c]}: {c}" for c in SHOWN if c not in listed]), f"run or list these: {new}"
    assert not (gone := [c for c in listed if c not in SHOWN]), f"no page shows these any more: {gone}"
    assert not (twice := [c for c, count in listed.items() if count > 1]), twice
    assert all(len(reason.split()) > 2 for reason in NOT_RUN.values())


def test_a_new_command_is_noticed(monkeypatch):
    monkeypatch.setitem(SHOWN, "kvasir serve --brand-new", "README.md")
    with pytest.raises(AssertionError, match="run or list these.*--brand-new"):
        test_every_command_is_run_or_listed_with_a_reason()


def test_commands_are_taken_from_blocks_whole():
    text = "```sh\na b   # why\nc \\\n  d\ncurl -d '{\n  \"x\": 1}'\n# nothing\n```\n```python\nno\n```\n"
    [block] = blocks(text, "sh|bash")
    assert commands(block) == ["a b", "c d", "curl -d '{ \"x\": 1}'"]


@pytest.mark.parametrize("command", OWN, ids=[c[:70] for c in OWN])
def test_the_command_line_knows_every_option(command, kvasir, monkeypatch, tmp_path):  # noqa: F811
    """Also of commands that are not run: their names, options and values are read, and nothing is done."""
    read = []
    with monkeypatch.context() as patch:
        hold(typer.main.get_command(app), patch, read)
        patch.chdir(tmp_path)
        for name in ("requests.jsonl", "replies.safetensors", "out.json", "pool.json", "table.json"):
            (tmp_path / name).write_text("{}")
        (tmp_path / "bench").symlink_to(ROOT / "bench")
        done = kvasir(*filled(command)[1:])
    assert done.code == 0 and read, done.err


def hold(command, patch, read: list) -> None:
    """Keep a command and those below it from doing anything."""
    below = command.list_commands(None) if hasattr(command, "list_commands") else ()
    for name in below:
        hold(command.get_command(None, name), patch, read)
    if not below:
        patch.setattr(command, "callback", lambda **options: read.append(options))


@pytest.mark.parametrize("command", [c for c in SHOWN if c.startswith("python ") and ("tools" in c or "studies" in c)])
def test_tools_have_the_options_that_pages_give_them(command):
    """What takes minutes or a GPU is not run, but its file exists and names every option."""
    _, *words = shlex.split(command)
    if words[1] == "kvasir_lab.studies":
        read_by(words[2], words[3:])
        return
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    text = Path(spec.origin).read_text()
    for option in re.findall(r"(?<= )--?[a-z][\w-]*", command.partition(name)[2]):
        assert f'"{option}"' in text, f"{name} has no {option}"


def read_by(name: str, words: list[str]) -> None:
    """Have a study read its options. What is no option of it fails the test."""
    main = importlib.import_module(f"kvasir_lab.studies.{name}").main
    words = [word.removesuffix("...") for word in words if word not in ("[", "]")]
    if isinstance(main, Study):
        main.parser().parse_args(words)
        return
    text = Path(importlib.util.find_spec(main.__module__).origin).read_text()
    for option in (word for word in words if word.startswith("-")):
        assert f'"{option}"' in text, f"{name} has no {option}"


# ---------------------------------------------------------------------------------------------------------- quick ones


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    (made / "requests.jsonl").write_text(REQUESTS)
    return made


def test_quick_commands_run(folder):
    for command in LISTS["quick"]:
        done = run(command, folder)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def server(folder):
    """A server with the options of all commands of the list "shared", and what their pages have one write first."""
    [code] = blocks((ROOT / "docs/methods/hooks.md").read_text(), "py")
    made = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert made.returncode == 0, made.stderr
    options = [word for command in LISTS["shared"] for word in shlex.split(command)[2:] if word != "base"]
    here = os.getcwd()
    os.chdir(folder)
    try:
        made = Served(folder, *options, model="base")
    finally:
        os.chdir(here)
    try:
        yield made
        assert made.process.poll() is None and "Traceback" not in made.log, made.log
    finally:
        made.kill()


@pytest.mark.parametrize("command", LISTS["served"], ids=[c[:70] for c in LISTS["served"]])
def test_requests_of_pages_are_answered(command, server):
    """As curl sends them: a body without a content type is a form."""
    words = iter(shlex.split(command)[1:])
    method, headers, body, url = None, {}, None, ""
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-X":
            method = next(words)
        elif word == "-d":
            body = next(words)
        else:
            url = word
    if body is not None:
        headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
    url = url.replace("http://127.0.0.1:8000", server.url)
    if '"model": "embedded"' in (body or ""):
        body = body.replace('"embedded"', '"base"')  # the name of a model that no argument gives
    reply = server.http.request(method or ("GET" if body is None else "POST"), url, headers=headers, content=body)
    assert reply.status_code in (200, 202), reply.text


# ------------------------------------------------------------------------------------------------------------ slow ones


@pytest.mark.slow
@pytest.mark.parametrize("command", LISTS["slow"], ids=[c[:70] for c in LISTS["slow"]])
def test_slow_commands_run(command, folder):
    words = filled(command)
    if words[:2] != ["kvasir", "serve"]:
        done = run(command, folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return
    model = words[2] if len(words) > 2 and not words[2].startswith("-") else ""
    options = words[3:] if model else words[2:]
    if "--max-model-len" in options:
        options[options.index("--max-model-len") + 1] = "4096"  # what our models hold
    here = os.getcwd()
    os.chdir(folder)
    try:
        made = Served(folder, *options, model=model or "base")
    finally:
        os.chdir(here)
    made.process.send_signal(signal.SIGTERM)
    code = made.process.wait(SECONDS)
    made.kill()
    assert code == 0, made.log
