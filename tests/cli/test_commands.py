"""The list of all commands, how they are found, and what is said where kvasir-lab is not installed."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from kvasir.cli import command
from kvasir.cli.main import app
from kvasir.errors import ConfigError
from kvasir.models import checkpoint

ROOT = Path(__file__).parents[2]
ENTRIES = tomllib.loads((ROOT / "packages" / "lab" / "pyproject.toml").read_text())["project"]["entry-points"]
# Every command in the order of the help, and whose it is.
COMMANDS = {
    "": ["serve", "chat", "generate", "doctor", "show", "eval", "solve", "convert", "bench", "cluster", "lab", "train"],
    "bench": [
        "run",
        "offline",
        "serve",
        "trace",
        "startup",
        "ladder",
        "profile",
        "speculation",
        "rollouts",
        "merge",
        "report",
        "plot",
        "pages",
        "constrained",
        "processors",
        "steps",
        "churn",
        "front",
        "routing",
        "drift",
        "day0",
        "thinking",
        "turns",
        "agents",
    ],
    "cluster": ["status"],
    "lab": ["train", "policy", "tasks", "show", "steer"],
    "lab steer": ["crest", "style"],
    "train": ["drafter", "exits", "idlm", "medusa2", "prm", "self_eval", "pair_rl", "adapter"],
}


def group_of(words: str):
    found = typer.main.get_command(app)
    for word in words.split():
        found = found.get_command(None, word)
    return found


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_of_a_group(words, kvasir):
    group = group_of(words)
    assert group.list_commands(None) == COMMANDS[words]
    shown = kvasir(*words.split(), "--help").out
    listed = [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines() if line.startswith("  ")]
    assert [name for name in listed if name in COMMANDS[words]] == COMMANDS[words]


@pytest.mark.parametrize("words", [f"{group} {name}".strip() for group, names in COMMANDS.items() for name in names])
def test_every_command_has_a_help_of_its_own(words, kvasir):
    done = kvasir(*words.split(), "--help")
    assert done.code == 0 and done.out.startswith(f"Usage: kvasir {words} ")
    assert len(done.out.partition("\n\n")[2].split("\n")[0]) > 20


def test_the_commands_of_the_lab_are_its_entry_points():
    named = {group: tuple(sorted(found)) for group, found in ENTRIES.items() if group in command.OF_LAB}
    assert named == command.OF_LAB and set(ENTRIES["kvasir.models.packaged"]) == set(checkpoint.OF_LAB)
    assert {n for n in COMMANDS[""] if (ROOT / "src/kvasir/cli/commands" / n).exists()} == {"bench", "cluster"}


@pytest.fixture
def alone(monkeypatch):
    """This process without the entry points of kvasir-lab, and with commands that nobody has asked for yet."""
    found = importlib.metadata.entry_points
    strangers = lambda **wanted: importlib.metadata.EntryPoints(  # noqa: E731
        e for e in found(**wanted) if not e.value.startswith("kvasir_lab")
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", strangers)
    monkeypatch.setattr(typer.main, "get_command", typer.main.get_command.__wrapped__)


@pytest.mark.parametrize(
    "words", ["lab tasks", "train drafter eagle", "eval", "solve", "bench turns", "convert heal a b --teacher c"]
)
def test_without_the_lab_its_commands_say_how_to_install_it(words, kvasir, alone):
    done = kvasir(*words.split())
    assert done.code == 2 and done.err.count("\n") == 1
    named = " ".join(words.split()[: 2 if words.startswith(("bench", "convert")) else 1])
    assert f"kvasir {named} comes with kvasir-lab" in done.err and "pip install -e packages/lab" in done.err


def test_without_the_lab_the_rest_is_there(kvasir, alone):
    shown = kvasir("--help").out
    assert "serve" in shown and "\n  lab " not in shown and "\n  eval " not in shown
    assert kvasir("bench", "serve", "--help").code == 0
    assert "Did you mean 'serve'" in kvasir("serv").err
    done = kvasir("show", "nano")
    assert done.code == 2 and "the model 'nano' comes with kvasir-lab" in done.err


def test_the_help_imports_no_torch_and_no_command_of_another_group():
    code = (
        "import sys; from kvasir.cli import main\n"
        "sys.argv = ['kvasir', '--help']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "others = {'torch', 'numpy', 'kvasir.cli.commands.bench.run', 'kvasir_lab.commands.lab.train'}\n"
        "found = others & set(sys.modules)\n"
        "assert not found and 'kvasir_lab.commands.eval' in sys.modules, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_declares_one_command(tmp_path, monkeypatch):
    for name, text in (("none", "x = 1\n"), ("one", ONE), ("two", ONE + ONE.replace("def one", "def two"))):
        (tmp_path / f"some_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    entries = [importlib.metadata.EntryPoint(n, f"some_{n}", "x") for n in ("none", "one", "two")]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group, **only: [e for e in entries if e.name == only.get("name")]
    )
    assert command.find("kvasir.cli.commands.cluster", "one").help == "Do one thing."
    assert command.find("kvasir.cli.commands.cluster", "other") is None
    for name in ("none", "two"):
        with pytest.raises(ConfigError, match="must declare one command"):
            command.find("kvasir.cli.commands.cluster", name)


ONE = '''
from kvasir.cli.command import command
@command(1)
def one() -> None:
    """Do one thing."""
'''
