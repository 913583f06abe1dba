"""The frame of studies: a function declares its name, arguments and result, and gets the rest.

A study is a module of `kvasir_lab/studies/` with one function ``main``::

    @study("trees-{model}")
    def main(report: Report, *, model: str = "base", count: Annotated[int, "problems a task"] = 3) -> Arms:
        for name in ...:
            yield name, {"nodes": 8}, {"tokens": 12}

``python -m kvasir_lab.studies NAME OUT.json --count 5`` runs it. Arguments come from the parameters. One without a
default stands by its position, a ``bool`` is a switch, and a ``tuple`` takes several values. Words beside a type are
its help or, with a dash, its flags; a collection beside it holds the choices.

Every arm that it yields is printed, and the result is written after each, with machine, versions, commit and command,
so a run that is cut off keeps what it has. What cannot be done is one line, and SIGTERM ends the study's servers too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvasir.bench import result as results
from kvasir.errors import ConfigError
from kvasir.logs import setup

# The repository, for studies of files that no package holds.
ROOT = Path(__file__).resolve().parents[4]
# The machine of a result that nothing was measured for.
SIMULATED = {"machine": "simulated: step times of an H200, nothing was measured"}
# The arms that a study yields: a name, a config and metrics each.
Arms = Iterator[tuple[str, dict[str, Any], dict[str, Any]]]


class Report:
    """The result of one run. ``options``: the study's arguments by name; ``more``: what it has besides its arms."""

    def __init__(self, case: str, options: argparse.Namespace) -> None:
        self.options = options
        self.output: Path | None = getattr(options, "output", None)
        self.case = case.format(
            **{name: Path(v).name if isinstance(v, str) else v for name, v in vars(options).items()}
        )
        self.arms: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    @property
    def before(self) -> list[dict[str, Any]]:
        """The arms of an earlier run in the same file."""
        return json.loads(self.output.read_text())["arms"] if self.output is not None and self.output.exists() else []

    def add(self, name: str, config: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Take one more arm: print it, and write the result so far."""
        print(name, metrics, flush=True)
        self.replace([*self.arms, results.arm(name, config, metrics)])

    def replace(self, arms: list[dict[str, Any]]) -> None:
        """Take ``arms`` in place of all others, and write the result so far."""
        self.arms = arms
        results.save(self.result(), self.output, self.options.commit)

    def result(self) -> dict[str, Any]:
        return results.result(self.case, self.arms) | self.more


class Study:
    """A study as the command line runs it: ``study(["OUT.json", "--count", "5"])`` returns the exit status."""

    def __init__(self, case: str, function: Callable[..., Any], needs_file: bool) -> None:
        self.case, self.function, self.needs_file = case, function, needs_file
        hints = get_type_hints(function, include_extras=True)
        self.parameters = [
            (parameter, hints[parameter.name])
            for parameter in list(inspect.signature(function).parameters.values())[1:]
        ]

    @property
    def name(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m kvasir_lab.studies {self.name}",
            description=sys.modules[self.function.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if self.case:
            told = "file of the result" + ("" if self.needs_file else "; default: print it")
            parser.add_argument("output", type=Path, nargs=None if self.needs_file else "?", help=told)
            parser.add_argument("--commit", help="commit that is measured; default: as git says")
        for parameter, hint in self.parameters:
            add_argument(parser, parameter, hint)
        return parser

    def __call__(self, given: list[str] | None = None) -> int:
        given = sys.argv[1:] if given is None else given
        options = self.parser().parse_args(given)
        for parameter, _ in self.parameters:
            if getattr(options, parameter.name) in (None, []):
                setattr(options, parameter.name, parameter.default)
        # A result records this as its command.
        sys.argv[:] = ["python", "-m", "kvasir_lab.studies", self.name, *map(str, given)]
        report = Report(self.case, options)
        found = self.function(report, **{p.name: getattr(options, p.name) for p, _ in self.parameters})
        if inspect.isgenerator(found):
            for arm in found:
                report.add(*arm)
            found = None
        if report.arms:
            results.finish(report.result(), report.output, options.commit)
        return found or 0


def study(case: str = "", *, needs_file: bool = False) -> Callable[[Callable[..., Any]], Study]:
    """Decorate a study's function. ``case``: the name of its result, in which ``{option}`` stands for an argument; ""
    for a study that writes something else. ``needs_file``: the run keeps more beside the file of its result."""
    return lambda function: Study(case, function, needs_file)


def add_argument(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    """Add the argument of one parameter."""
    kind, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    words = [word for word in beside if isinstance(word, str)]
    flags, told = [w for w in words if w.startswith("-")], " ".join(w for w in words if not w.startswith("-"))
    options: dict[str, Any] = {"help": told.replace("%", "%%")} if told else {}
    for choices in beside:
        if not isinstance(choices, str):
            options["choices"] = list(choices)
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        options |= {"nargs": "+", "action": "extend"}  # one flag for all values, or one for each
    if get_origin(kind) is Literal:
        options["choices"] = list(get_args(kind))
    elif kind is bool:
        options["action"] = "store_true"
    else:
        options["type"] = kind
    if parameter.default is inspect.Parameter.empty:
        parser.add_argument(parameter.name, **{k: v for k, v in options.items() if k != "action"})
        return
    if kind is not bool and "nargs" not in options:  # the default of several values is set afterwards
        options["default"] = parameter.default
    parser.add_argument(*(flags or [f"--{parameter.name.replace('_', '-')}"]), dest=parameter.name, **options)


def run(main: Callable[[list[str]], int | None], given: list[str]) -> int:
    """Run a study's ``main`` as a command."""
    setup()
    # `timeout` sends SIGTERM: servers must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main(given) or 0
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
