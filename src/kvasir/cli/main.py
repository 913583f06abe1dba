"""The ``kvasir`` command. A command imports its work when it runs, so ``kvasir --help`` needs no torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvasir import __version__
from kvasir.cli.command import group
from kvasir.errors import ConfigError, RequestError, bounded, of_a_file
from kvasir.logs import escaped, setup
from kvasir.progress import imports_told


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app = group(
    "kvasir.cli.commands",
    0,
    "An LLM inference engine in which every efficiency method is a switch.\n\n"
    "`kvasir serve` starts an OpenAI-compatible server on http://127.0.0.1:8000 with the model that ships in the "
    "package; `kvasir serve MODEL` serves a checkpoint folder or a hub id.",
    callback=options,
).app


def main() -> None:
    """Run the command line. Errors of configuration and requests, a disk that takes no more, and a path that cannot be
    opened become one message and an exit code, not a traceback.

    Exit codes: 0 done, 2 the configuration or the command line is wrong, 3 a request was refused, 130 interrupted.
    """
    setup()
    try:
        with imports_told("torch", "PyTorch"):
            app(prog_name="kvasir")
    except ConfigError as e:
        _fail(str(e), 2)
    except RequestError as e:
        _fail(e.message + (f" ({e.param})" if e.param and e.param not in e.message else ""), 3)
    except OSError as e:
        message = of_a_file(e)
        if message is None:
            raise
        _fail(bounded(message), 2)


def _fail(message: str, code: int) -> None:
    # Messages quote names out of files of strangers, which must not steer the terminal.
    typer.secho("\n".join(map(escaped, f"error: {message}".split("\n"))), fg="red", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
