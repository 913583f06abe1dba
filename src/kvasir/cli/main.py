"""The ``kvasir`` command. Each command's work is imported when it runs: ``kvasir --help`` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvasir import __version__
from kvasir.cli.options import build_settings, settle_vllm_flags, with_settings
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from kvasir.logs import setup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", help=(
    "An LLM inference engine in which every efficiency method is a switch.\n\n"
    "[b]kvasir serve[/b] starts an OpenAI-compatible server on http://127.0.0.1:8000 with the model in the package; "
    "[b]kvasir serve MODEL[/b] serves a checkpoint folder or a hub id."))
bench = typer.Typer(no_args_is_help=True, help="Measure: offline batches, a server under load, start-up.")
app.add_typer(bench, name="bench")

Model = Annotated[str, typer.Argument(help="Checkpoint folder or hub id; empty: the model in the package.")]


@app.command()
@with_settings(Settings, skip=("model",))
def serve(model: Model = "", **options: Any) -> None:
    """Serve a model over the OpenAI API."""
    from kvasir.cli import serve as command

    command.run(build_settings({"model": model, **options}))


@app.command()
@with_settings(EngineConfig, skip=("model",))
def chat(model: Model = "", system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
         url: Annotated[str | None, typer.Option(help="Talk to a running server instead, e.g. http://127.0.0.1:8000.")] = None,
         temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
         max_tokens: Annotated[int | None, typer.Option(help="Most tokens an answer.")] = None, **options: Any) -> None:
    """Talk to a model in the terminal."""
    from kvasir.cli import chat as command

    command.run(build_settings({"model": model, **options}, EngineConfig), system=system, url=url, temperature=temperature, max_tokens=max_tokens)


@app.command()
@with_settings(EngineConfig, skip=("model", "seed"))
def generate(model: Model = "", prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A prompt.")] = None,
             file: Annotated[Path | None, typer.Option("--input", "-i", help="Text file (one prompt) or .jsonl (one request a line); - reads stdin.")] = None,
             output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON lines here instead of text to stdout.")] = None,
             params: Annotated[str | None, typer.Option(help='Sampling parameters as JSON, e.g. \'{"temperature": 0, "max_tokens": 64}\'.')] = None,
             chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the chat template.")] = False, **options: Any) -> None:
    """Complete prompts from the command line or a file."""
    from kvasir.cli import generate as command

    command.run(build_settings({"model": model, **options}, EngineConfig), prompt=prompt, source=file, output=output, params=params, chat=chat)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Say what this machine and installation can do, what falls back, and why."""
    from kvasir.cli import doctor as command

    command.run(as_json)


@app.command()
def show(model: Model = "", dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of weights and KV.")] = "bfloat16",
         memory_gib: Annotated[float | None, typer.Option("--memory", help="GiB to plan for; default: this machine's GPU, else its RAM.")] = None,
         as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Show a model: layers, bytes per token, and what fits where."""
    from kvasir.cli import show as command

    command.run(model, dtype, memory_gib, as_json)


@bench.command("offline")
@with_settings(EngineConfig, skip=("model",))
def bench_offline(model: Model = "", shape: Annotated[str | None, typer.Option(help="A known shape with random weights, e.g. llama-8b.")] = None,
                  workload: Annotated[list[str] | None, typer.Option("--workload", "-w", help="NAME:BATCH:PROMPT:OUTPUT, repeatable.")] = None,
                  peer: Annotated[str | None, typer.Option(help="Also run this engine, e.g. transformers.")] = None,
                  repeats: Annotated[int, typer.Option(help="Runs of each arm; the median counts.")] = 3,
                  output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None, **options: Any) -> None:
    """Batches through the Python API: tokens per second, against a peer in the same run."""
    from kvasir.bench import offline

    offline.run(build_settings({"model": model, **options}, EngineConfig), shape=shape, workloads=workload, peer=peer, repeats=repeats, output=output)


@bench.command("serve")
def bench_serve(url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
                rate: Annotated[float, typer.Option(help="Requests a second, Poisson arrivals; 0: all at once.")] = 4.0,
                num_requests: Annotated[int, typer.Option("--num-requests", "-n", help="Requests to send.")] = 100,
                prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
                output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
                api_key: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
                output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None) -> None:
    """A running server under open-loop load: TTFT, ITL, throughput."""
    from kvasir.bench import online

    online.run(url, rate=rate, num_requests=num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, api_key=api_key, output=output)


@bench.command("startup")
@with_settings(EngineConfig, skip=("model",))
def bench_startup(model: Model = "", shape: Annotated[str | None, typer.Option(help="A known shape with random weights, e.g. llama-8b.")] = None,
                  repeats: Annotated[int, typer.Option(help="Starts; the first one is the coldest.")] = 3,
                  output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None, **options: Any) -> None:
    """From exec of `kvasir serve` to the first token, with a breakdown."""
    from kvasir.bench import startup

    startup.run(build_settings({"model": model, **options}, EngineConfig), options, shape=shape, repeats=repeats, output=output)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: set-up and request errors become one clear message and an exit code, never a traceback."""
    setup()
    try:
        args = settle_vllm_flags(sys.argv[1:])
        app(args=args, prog_name="kvasir")
    except ConfigError as e:
        typer.secho(f"error: {e}", fg="red", err=True)
        raise SystemExit(2) from None
    except RequestError as e:
        typer.secho(f"error: {e.message}" + (f" ({e.param})" if e.param else ""), fg="red", err=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
