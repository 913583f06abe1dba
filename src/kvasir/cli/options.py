"""Command-line options made from the settings: one option per field, with its help line and vLLM's name for it."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from kvasir.api.offline.vllm_args import translated
from kvasir.api.offline.vllm_flags import vllm_flags
from kvasir.compose import compose
from kvasir.config import EngineConfig, ServerConfig, Settings, read_toml
from kvasir.errors import ConfigError, nearest
from kvasir.records import RecordFile

# Newer releases of typer carry their own copy of click; its exceptions live in the module of ``typer.BadParameter``.
NoSuchOption = sys.modules[typer.BadParameter.__module__].NoSuchOption
# Environment variable with the server's key.
KEY_VARIABLE = "KVASIR_API_KEY"
# Prefix of the parameters that stand for vLLM's flags without a setting of ours.
_VLLM = "vllm_"
# Flags of vLLM that take several values, and the flag that each further value gets here.
SEVERAL = {"--lora-modules": "--lora-modules", "--served-model-name": "--model-alias"}


class Command(TyperCommand):
    """A command whose help shows names in full, and which answers an
    unknown option with the nearest one or a reason."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            kind = "Options" if parameter.param_type_name == "option" else "Arguments"
            record = parameter.get_help_record(ctx)
            if record:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=32)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(p.name.startswith(_VLLM) for p in self.get_params(ctx)):  # a command with settings
            args, lines = translated(args, {n for p in self.get_params(ctx) for n in (*p.opts, *p.secondary_opts)})
            for line in lines:
                print(line, file=sys.stderr)
        try:
            return super().parse_args(ctx, one_value_each(args))
        except NoSuchOption as e:
            if (instead := vllm_flags().unserved.get(e.option_name)) is not None:
                raise ConfigError(f"kvasir does not serve vLLM's {e.option_name}: {instead}.") from None
            known = [
                name
                for p in self.get_params(ctx)
                if not getattr(p, "hidden", False)
                for name in (*p.opts, *p.secondary_opts)
            ]
            hint = nearest(e.option_name, known)
            raise ConfigError(f"no option {e.option_name}.{hint} {ctx.command_path} --help lists all.") from None


def one_value_each(args: list[str]) -> list[str]:
    """The arguments with one flag before each value, where vLLM's flags take several: adapters, and names of the model,
    the first of which answers name. Names may be several only where the model comes first, as vLLM writes it."""
    found: list[str] = []
    several = SEVERAL if args and not args[0].startswith("-") else {k: v for k, v in SEVERAL.items() if k == v}
    flag, count = "", 0
    for arg in args:
        if arg.startswith("-"):
            flag, count = arg if arg in several else "", 0
        elif flag:
            count += 1
            if count > 1:
                found.append(several[flag])
        found.append(arg)
    return found


def setting_parameters(cls: type, *, skip: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Keyword parameters, one per field of the settings, grouped by section in ``--help``."""
    found = []
    for section in dataclasses.fields(cls):
        owner = section.default_factory  # type: ignore[misc]
        for f in dataclasses.fields(owner):
            if f.name in skip:
                continue
            flag = f.name.replace("_", "-")
            names = [n if n.startswith("-") else f"--{n}" for n in (flag, *f.metadata["aliases"])]
            if f.type.startswith("bool"):
                names = names if f.default is False else [f"{names[0]}/--no-{flag}", *names[1:]]
            if f.metadata["off"]:
                names.append(f" /--{f.metadata['off']}")
            option = typer.Option(
                None,
                *names,
                help=f.metadata["help"] + _default(f.default),
                show_default=False,
                rich_help_panel=section.name.capitalize(),
            )
            found.append(
                inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_annotation(str(f.type))
                )
            )
    return found


def _default(value: Any) -> str:
    if value in (None, "", (), False):
        return ""
    return f" [{'on' if value is True else value}]"


def _annotation(kind: str) -> Any:
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        return Literal[tuple(w.strip().strip("\"'") for w in kind[8:-1].split(","))] | None  # type: ignore[valid-type]
    return {"tuple[str, ...]": list[str], "str": str, "int": int, "float": float, "bool": bool}[kind] | None


def _vllm_parameters(
    flags_that_hold: tuple[str, ...], only_at: dict[tuple[str, ...], tuple[str, ...]]
) -> list[inspect.Parameter]:
    """Hidden options for flags of vLLM that are accepted without a setting of ours."""

    def parameter(names: tuple[str, ...], default: Any, kind: Any) -> inspect.Parameter:
        option = typer.Option(default, *names, hidden=True)
        return inspect.Parameter(
            _VLLM + names[0].strip("-").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=option,
            annotation=kind,
        )

    return [parameter((flag,), False, bool) for flag in flags_that_hold] + [
        parameter(flags, None, str | None) for flags in only_at
    ]


def _check_vllm(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options without vLLM's flags. Raises ConfigError for a flag's value that is not served."""
    table = vllm_flags()
    for flags, served in (table.only_at | table.only_at_offline).items():
        value = given.get(_VLLM + flags[0].strip("-").replace("-", "_"))
        if value is not None and value not in served:
            raise ConfigError(table.unserved_value(flags[0], f"{flags[0]} {value}", served))
    return {k: v for k, v in given.items() if not k.startswith(_VLLM)}


def with_settings(cls: type, *, skip: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorate a command that takes ``**options``, so that its command line has every setting of ``cls``."""

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option("--config", help="TOML file with settings; the command line overrides it.")
            ],
        )
        # An option of the command itself wins over vLLM's flag of that name.
        table, server = vllm_flags(), cls is Settings
        holds = table.satisfied if server else (*table.satisfied, *table.satisfied_offline)
        only_at = table.only_at if server else table.only_at | table.only_at_offline
        vllm = [p for p in _vllm_parameters(holds, only_at) if p.name.removeprefix(_VLLM) not in signature.parameters]
        # So it does over a setting of that name.
        parameters = own + [config] + setting_parameters(cls, skip=(*skip, *signature.parameters)) + vllm

        def run(**given: Any) -> Any:
            return command(**_check_vllm(given))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def build_settings(options: dict[str, Any], cls: type = Settings) -> Any:
    """Build ``cls`` from a TOML file (``options['config']``), overridden by the options of the command line."""
    options = dict(options)
    file = options.pop("config", None)
    merged = read_toml(file) if file else {}
    server_names = {f.name for f in dataclasses.fields(ServerConfig)}
    if cls is EngineConfig:
        merged = {k: v for k, v in merged.items() if k not in server_names}
    # Without a model on the command line, "" must not hide the file's model.
    merged |= {k: v for k, v in options.items() if v is not None and not (k == "model" and v == "")}
    if cls is Settings and not merged.get("api_key") and KEY_VARIABLE in os.environ:
        # From the environment, because every user of the machine can see a key on a command line.
        merged["api_key"] = [os.environ[KEY_VARIABLE]]
    return compose(cls, merged)


def check_output(file: Path | None, *, make: bool = False) -> None:
    """Raise ConfigError before the work when its result could not be written. ``make``: also create the folder."""
    if file is None:
        return
    try:
        if make:
            file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        try:
            with RecordFile(file, sync=True) as opened:
                opened.try_room()
        finally:
            if new:
                file.unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(
            f"cannot write {file}: {e.strerror}. Name a file in a folder that exists, can be written and has room"
        ) from e
