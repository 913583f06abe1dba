"""``kvasir show``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvasir.cli.arguments import (
    AsJSON,
    Model,
)
from kvasir.cli.command import command
from kvasir.config import CacheConfig


@command(50)
def show(
    model: Model = "",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of weights and KV; default: float32 on a CPU, bfloat16 on GPUs."),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory", min=0, help="Memory to plan for, in GiB; default: here and common GPUs.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Format that plain weights are quantised to, as for serve; auto: as stored.")
    ] = "auto",
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of a recurrent model's states, as for serve.")
    ] = "float32",
    cpu_cache_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of the KV pool on a CPU, as for serve.")
    ] = CacheConfig().cpu_cache_bytes,
    as_json: AsJSON = False,
) -> None:
    """Show a model's layers, bytes per token, and what fits into which memory."""
    from kvasir.cli import show as command

    command.run(as_json, model, dtype, memory_gib, weights, state_dtype, cpu_cache_bytes)
