"""Commands run as users run them, but in this process, because a new process for each would load torch each time."""

import functools
import io
import sys
from dataclasses import dataclass

import pytest
import typer.main

from kvasir.cli.main import main
from kvasir.logs import log


@dataclass
class Done:
    code: int
    out: str
    err: str


# Commands are the same in every test, and making click's of ours takes longer than most of them.
COMMAND = functools.cache(typer.main.get_command)


@pytest.fixture
def kvasir(monkeypatch, capsys):
    """A function like ``kvasir("show", "--json", stdin="...")`` that returns exit code, stdout and stderr. An exception
    other than an exit is a bug."""

    def run(*args: object, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", ["kvasir", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(code, out, err)

    monkeypatch.setattr(typer.main, "get_command", COMMAND)
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    handlers, level = log.handlers[:], log.level
    log.handlers[:] = []  # those of an earlier test write to a stream that is closed
    yield run
    log.handlers[:] = handlers
    log.setLevel(level)
