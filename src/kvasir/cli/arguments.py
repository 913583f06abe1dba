"""Arguments and options that several commands share."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.options import build_settings
from kvasir.config import EngineConfig, read_toml

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Checkpoint folder or hub id; default: the model that ships in the package.",
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy; default: the checkpoint's, else 1.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens per answer.")]
# Named as the option of vLLM that is refused elsewhere, so that this one stands in its place.
Replicas = Annotated[
    int,
    typer.Option(
        "--replicas",
        "--data-parallel-size",
        "-dp",
        min=1,
        help="Engines that share the work, each on a GPU of its own.",
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="KVASIR_API_KEY", help="The server's key.")]

# Those of measurements.
Shape = Annotated[str | None, typer.Option(help="Known model shape with random weights, e.g. llama-8b.")]
Repeats = Annotated[int, typer.Option(min=1, help="Number of measured runs.")]
JSONFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file, and not to stdout.")]
Commit = Annotated[
    str | None,
    typer.Option(envvar="KVASIR_COMMIT", help="Commit that is measured; default: as git says."),
]
Peer = Annotated[
    str | None, typer.Option(help="Engine to compare with, run before and after ours: vllm or transformers.")
]
Site = Annotated[
    str | None,
    typer.Option("--peer-python-path", help="Folder of the peer's packages, if they are not installed here."),
]
Workloads = Annotated[
    list[str] | None, typer.Option("--workload", "-w", help="Workload as NAME:BATCH:PROMPT:OUTPUT; repeatable.")
]


def given(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def model_and_settings(model: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model, and the checked settings that the command line or its TOML file gives.

    Settings given at our defaults are included, because a peer's defaults may differ.
    """
    from kvasir.bench.offline import described

    config = build_settings({"model": model, **options}, EngineConfig)
    named = {k for k, v in options.items() if v is not None} | set(
        read_toml(options["config"]) if options.get("config") else ()
    )
    settings = described(config, None) | {
        k: v for section in asdict(config).values() for k, v in section.items() if k in named
    }
    settings.pop("model", None)
    return config.model.model, settings
