"""``kvasir convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.errors import ConfigError
from kvasir.technique import names

CONVERTER_HELP = "Converter and its options, e.g. outlier_twin:keys=16. Converters: " + ", ".join(
    names("kvasir.convert.converters")
)


@command(80)
def convert(
    converter: Annotated[str, typer.Argument(metavar="NAME:KEY=VALUE", help=CONVERTER_HELP)],
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model to convert: a folder, a name or a hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    device: Annotated[
        str | None,
        typer.Option(help="Where a calibration or a healing runs; default: a GPU, if there is one."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="With heal: the model that SRC was converted from.", rich_help_panel="heal")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="With heal: training time (default 3).", rich_help_panel="heal")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="With heal: steps, not minutes.", rich_help_panel="heal")] = None,
    texts: Annotated[
        Path | None, typer.Option(help="With heal: UTF-8 file to train on.", rich_help_panel="heal")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With heal: continue a stopped run.", rich_help_panel="heal")
    ] = False,
) -> None:
    """Rewrite a checkpoint folder with a converter, or heal a converted one: `convert heal SRC DST --teacher MODEL`."""
    from kvasir.cli import convert as command

    if converter == "heal":
        command.heal(source, target, teacher, minutes, steps, texts, resume, device)
        return
    if (
        given := [n for n, v in dict(teacher=teacher, minutes=minutes, steps=steps, texts=texts).items() if v]
        + ["resume"] * resume
    ):
        raise ConfigError(f"--{given[0]} belongs to `kvasir convert heal`, not to '{converter}'")
    command.run(converter, source, target, device)
