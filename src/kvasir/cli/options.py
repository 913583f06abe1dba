"""Command-line options made from the settings: one option a field, with its help line and vLLM's spelling beside ours."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import typer

from kvasir.config import EngineConfig, Settings, compose, read_toml
from kvasir.errors import ConfigError

# vLLM flags that ask for what is the case anyway: accepted, so that a start script moves over unchanged.
SATISFIED = {"--enforce-eager": 0, "--enable-chunked-prefill": 0, "--enable-auto-tool-choice": 0, "--disable-log-requests": 0,
             "--disable-log-stats": 0, "--no-trust-remote-code": 0}
# vLLM flags with another meaning of "the usual": accepted at the value we serve, refused by name at any other.
ONLY_AT = {"--tensor-parallel-size": "1", "--pipeline-parallel-size": "1", "--data-parallel-size": "1", "--tokenizer-mode": "auto"}


def setting_parameters(cls: type, *, skip: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """One keyword parameter per settings field, grouped by section in ``--help``."""
    found = []
    for section in dataclasses.fields(cls):
        owner = section.default_factory  # type: ignore[misc]
        for f in dataclasses.fields(owner):
            if f.name in skip:
                continue
            flag = f.name.replace("_", "-")
            names = [f"--{n}" for n in (flag, *f.metadata["aliases"])]
            if f.type == "bool":
                names = [f"{names[0]}/--no-{flag}"] if f.default else names
            option = typer.Option(None, *names, help=f.metadata["help"], show_default=False, rich_help_panel=section.name.capitalize())
            found.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_annotation(str(f.type))))
    return found


def _annotation(kind: str) -> Any:
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        return Optional[Literal[tuple(w.strip().strip("\"'") for w in kind[8:-1].split(","))]]  # type: ignore[valid-type]
    return Optional[{"tuple[str, ...]": list[str], "str": str, "int": int, "float": float, "bool": bool}[kind]]


def with_settings(cls: type, *, skip: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorator: the command takes ``**options`` and the command line shows every setting of ``cls``."""

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[
            str | None, typer.Option("--config", help="TOML file with settings; the command line goes first.")])
        parameters = own + [config] + setting_parameters(cls, skip=skip)

        def run(**given: Any) -> Any:
            return command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def build_settings(options: dict[str, Any], cls: type = Settings) -> Any:
    """Settings from a TOML file (``options['config']``), under what the command line gives."""
    options = dict(options)
    file = options.pop("config", None)
    merged = read_toml(file) if file else {}
    if cls is EngineConfig:
        server_names = {f.name for f in dataclasses.fields(Settings().server)}
        merged = {k: v for k, v in merged.items() if k not in server_names}
    merged |= {k: v for k, v in options.items() if v is not None}
    if "api_key" in {f.name for s in dataclasses.fields(cls) for f in dataclasses.fields(s.default_factory)} and not merged.get("api_key"):  # type: ignore[arg-type, misc]
        key = os.environ.get("KVASIR_API_KEY")  # keys on a command line are seen by every user of the machine
        if key:
            merged["api_key"] = [key]
    return compose(cls, merged)


def settle_vllm_flags(args: list[str]) -> list[str]:
    """Drop flags that ask for what holds anyway; refuse a value we do not serve. Raises ConfigError."""
    kept, i = [], 0
    while i < len(args):
        flag, _, value = args[i].partition("=")
        if flag in SATISFIED:
            i += 1
            continue
        if flag in ONLY_AT:
            if not value and i + 1 < len(args):
                i += 1
                value = args[i]
            if value != ONLY_AT[flag]:
                raise ConfigError(f"{flag} {value} is not served yet; only {flag} {ONLY_AT[flag]} is.")
            i += 1
            continue
        kept.append(args[i])
        i += 1
    return kept
