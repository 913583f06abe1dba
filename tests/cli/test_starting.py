"""A start is not silent, and who talks to the packaged model is told so."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvasir
from kvasir.cli.convert import Shown
from kvasir.cli.starting import packaged
from kvasir.progress import loading

PACKAGE = Path(kvasir.__file__).parent


def test_the_packaged_model_is_named(tmp_path):
    assert "'base' answers" in packaged("", "kvasir serve") and "kvasir serve PATH" in packaged("", "kvasir serve")
    assert "'nano' answers" in packaged("nano", "kvasir chat")
    assert packaged(str(tmp_path), "kvasir serve") == "" and packaged("org/model", "kvasir serve") == ""


def test_loading_is_said_where_there_is_no_terminal(capsys):
    with loading("org/model"):
        assert capsys.readouterr().err == "loading org/model\n"
    done = capsys.readouterr()
    assert done.err.startswith("loaded after ") and not done.out


def test_a_chat_says_what_answers_before_the_first_message(kvasir, monkeypatch):
    monkeypatch.setattr("kvasir.cli.chat._in_process", lambda config, stack: lambda messages, sampling: iter(()))
    done = kvasir("chat")
    assert "packaged model 'base' answers" in done.out and "loading the packaged model" in done.err


def test_engines_of_benchmarks_are_loaded_in_one_place():
    for folder in ("bench", "cli", "lab"):
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            text = file.read_text()
            if "peers" not in file.parts and re.search(r"\bLLM\((config=|model)", text):
                assert "with loading(" in text or file.name == "chat.py", f"{file}: a start without a line"


@pytest.mark.parametrize(
    "command",
    [
        "solve --strategy majority:n=2 --model nano --task chain -n 2 --max-tokens 8",
        "solve --strategy majority:n=2 --model nano --task chain -n 2 --max-tokens 8 --pool 2",
        "bench offline nano -w d:1:8:48 --repeats 1",
        "bench profile nano --batch 1 --prompt 8 --repeats 1",
        "bench speculation nano --drafter ngram --task chain --count 1 --repeats 1 --output-tokens 4",
        "eval nano --tasks chain -n 2",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_every_command_that_loads_a_model_says_so(command, kvasir):
    done = kvasir(*command.split(), "--num-threads", 1)
    assert done.code == 0, done.err
    assert "loading nano" in done.err and "loaded after " in done.err and "loading" not in done.out


def test_a_conversion_tells_how_far_its_calibration_is(tmp_path):
    shown = []

    class Bar:
        title = ""

        def show(self, done, of):
            shown.append((self.title, done, of))

    from kvasir.convert.checkpoint import convert
    from kvasir.convert.converter import load_converter
    from kvasir.models import checkpoint
    from kvasir_lab.calibration import default_texts

    bar = Shown(Bar(), 3 << 20)
    folder, spec = checkpoint.resolve("nano"), "lowrank"
    convert(load_converter(spec), spec, folder, tmp_path / "out", texts=default_texts, calibrated=bar.layer)
    layers = shown[0][2]
    assert [done for _, done, _ in shown[:layers]] == list(range(1, layers + 1))
    assert shown[0][0] == "calibrating, pass 1, layer" and shown[layers][0] == "calibrating, pass 2, layer"
    bar.read(1 << 20)
    assert shown[-1] == ("converting, MiB", 1, 3)


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[0] = "kvasir"
from kvasir.__main__ import run
run()
"""


@pytest.mark.parametrize("at", ["typer", "kvasir.errors", "kvasir.cli.command"])
def test_an_interrupt_while_the_command_is_imported(at):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, at], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_begins_there():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kvasir"] == "kvasir.__main__:run"
