"""Commands are found as techniques are: a module in a group's folder declares one command, and nothing else names it.

A command is a function with ``@command(order)`` (``kvasir/cli/commands/serve.py`` is ``kvasir serve``). A group is a
package whose ``__init__`` calls `group`; its modules are its commands. An installed package adds a command by an entry
point of the group's package (``[project.entry-points."kvasir.cli.commands.bench"]  mine = "my_lab.mine"``). A module is
imported when its command runs or its group's help is shown, and imports its own work when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvasir.cli.options import Command
from kvasir.errors import ConfigError, from_lab
from kvasir.technique import module, of_all

# Commands of kvasir-lab, by the package of their group: without it they are answered with how to install it.
# tests/cli/test_commands.py compares them with the entry points of packages/lab/pyproject.toml.
OF_LAB = {
    "kvasir.cli.commands": ("eval", "lab", "solve", "train"),
    "kvasir.cli.commands.bench": (
        "churn",
        "constrained",
        "day0",
        "drift",
        "front",
        "ladder",
        "pages",
        "plot",
        "processors",
        "profile",
        "rollouts",
        "routing",
        "speculation",
        "steps",
        "thinking",
        "turns",
    ),
}


@dataclass(frozen=True)
class Declared:
    """A command: its ``function`` and its place in the help of its group, where a lower ``order`` comes first."""

    order: int
    function: Callable[..., Any]
    text: str = ""  # instead of the function's docstring

    @property
    def help(self) -> str:
        return self.text or inspect.getdoc(self.function) or ""

    def build(self, name: str) -> Any:
        """The command as the command line runs it."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, cls=Command, help=self.text or None)(self.function)
        return typer.main.get_command(app)


@dataclass(frozen=True)
class Group:
    """A group of commands: its place in the help of its own group, and the application that holds it."""

    order: int
    app: typer.Typer

    @property
    def help(self) -> str:
        return inspect.cleandoc(self.app.info.help or "")

    def build(self, name: str) -> Any:
        built = typer.main.get_command(self.app)
        built.name = name
        return built


def command(order: int, text: str = "") -> Callable[[Callable[..., Any]], Declared]:
    """Decorate the function of a module's one command."""
    return lambda function: Declared(order, function, text)


def nothing() -> None:
    pass


def group(
    package: str,
    order: int,
    help: str,
    *,
    callback: Callable[..., None] = nothing,
    more: Callable[[], Mapping[str, Declared]] = dict,
) -> Group:
    """Declare the group whose commands are the modules of ``package``, and those of installed packages.

    ``callback``: runs before any of them. ``more``: commands that have no module of their own, by name.
    """
    kind = type("Commands", (Commands,), {"package": package, "more": staticmethod(more)})
    # Plain help: the boxes of typer's rich help cut off long option names in a terminal of 80 columns.
    app = typer.Typer(
        cls=kind,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=help,
    )
    app.callback()(callback)
    return Group(order, app)


class Commands(TyperGroup):
    """The commands of one package, each imported when it is asked for."""

    package = ""
    more: Callable[[], Mapping[str, Declared]] = dict

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._declared())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; None when there is none. Raises ConfigError for a command of kvasir-lab where that is not
        installed."""
        if cmd_name not in self.commands:
            found = find(self.package, cmd_name) or self.more().get(cmd_name)
            if found is None:
                if cmd_name in OF_LAB.get(self.package, ()):
                    raise ConfigError(from_lab(f"{ctx.command_path} {cmd_name}"))
                for name in self.list_commands(ctx):  # typer names the nearest of these
                    self.get_command(ctx, name)
                return None
            self.commands[cmd_name] = found.build(cmd_name)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands from what they declare: their options are built only for the command that runs."""
        declared = self._declared()
        limit = formatter.width - 6 - max(map(len, declared))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, TyperCommand(name, help=one.help).get_short_help_str(limit)) for name, one in declared.items()]
            )

    def _declared(self) -> dict[str, Declared | Group]:
        """All commands by name, in the order of the help."""
        found = {**dict(of_all(self.package, lambda name: (name, find(self.package, name)))), **self.more()}
        return dict(sorted(found.items(), key=lambda pair: pair[1].order))


def find(package: str, name: str) -> Declared | Group | None:
    """The command ``name`` of a group's package; None when there is none. Raises ConfigError for a module that declares
    none, or several."""
    holder = module(package, name)
    return None if holder is None else _declared_in(holder)


def _declared_in(holder: ModuleType) -> Declared | Group:
    declared = [value for value in vars(holder).values() if isinstance(value, Declared | Group)]
    if len(declared) != 1:
        raise ConfigError(f"{holder.__file__} must declare one command, and declares {len(declared)}")
    return declared[0]
