"""``kvasir bench``: measurements. A command imports its work when it runs."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.config import EngineConfig, read_toml
from kvasir.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed, and compare it with other engines.",
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Checkpoint folder or hub id; default: the model that ships in the package.",
    ),
]
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
ApiKey = Annotated[str | None, typer.Option(envvar="KVASIR_API_KEY", help="The server's key.")]
Workloads = Annotated[
    list[str] | None, typer.Option("--workload", "-w", help="Workload as NAME:BATCH:PROMPT:OUTPUT; repeatable.")
]


@app.callback()
def ended_in_order() -> None:
    # `timeout` and service managers send SIGTERM; engines in processes of their own must end with this one.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _given(model: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
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


@app.command("run", cls=Command)
def run_case(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="Case file, e.g. bench/cases/llama-8b.toml.")],
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Also run the case's peer.")] = True,
    site: Site = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of measured rounds of ours; default: the case's.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-w", help="Workload of the case to run; repeatable; default: all.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder with the case's traces.")] = Path("."),
    capacity: Annotated[
        float | None, typer.Option(min=0, help="Requests per second that the peer completed in an earlier run.")
    ] = None,
    commit: Commit = None,
    output: JSONFile = None,
) -> None:
    """Run a case: our arms in turns, between two runs of a peer, with the targets that were met or missed."""
    from kvasir.bench import case as cases
    from kvasir.bench import compare, replay

    check_output(output, make=True)
    found = cases.read(case)
    if found.traces:
        replay.run_case(
            found,
            peer=peer,
            site=site,
            repeats=repeats,
            only=only,
            output=output,
            commit=commit,
            data=data,
            capacity=capacity,
        )
    else:
        compare.run_case(found, peer=peer, site=site, repeats=repeats, only=only, output=output, commit=commit)


@app.command("offline", cls=Command)
@with_settings(EngineConfig, skip=("model",))
def offline(
    model: Model = "",
    shape: Shape = None,
    workload: Workloads = None,
    peer: Annotated[str | None, typer.Option(help="Engine to compare with, e.g. transformers.")] = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure tokens per second of batches through the Python API, alone or compared with a peer."""
    from kvasir.bench import offline as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        workloads=workload,
        peer=peer,
        repeats=repeats,
        output=output,
        commit=commit,
    )


@app.command("serve", cls=Command)
def serve(
    url: Annotated[str, typer.Option(help="Running server, with or without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0, help="Requests per second, Poisson arrivals; 0: all at once.")] = 4.0,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1, help="Number of requests.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    api_key: ApiKey = None,
    commit: Commit = None,
    output: JSONFile = None,
) -> None:
    """Measure a running server under open-loop load: TTFT, ITL and throughput."""
    from kvasir.bench import online

    check_output(output, make=True)
    online.run(
        url,
        rate=rate,
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        api_key=api_key,
        output=output,
        commit=commit,
    )


@app.command("trace", cls=Command)
@with_settings(EngineConfig, skip=("model",))
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace: Azure's csv or Mooncake's JSON lines (.gz).")],
    model: Model = "",
    shape: Shape = None,
    url: Annotated[str | None, typer.Option(help="Running server, with or without /v1; default: start one.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second; default with recorded arrivals: as recorded.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0.01, help="Rate as a share of the peer's capacity, which is measured first.")
    ] = None,
    capacity: Annotated[
        float | None, typer.Option(min=0, help="Requests per second that the peer completed in an earlier run.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="Arrival times: poisson or recorded.")] = "poisson",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, help="Least number of requests per window.")
    ] = 1000,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of a window, in seconds.")] = 60.0,
    clip: Annotated[int | None, typer.Option(min=1, help="Cut prompts to this many tokens.")] = None,
    scale: Annotated[float, typer.Option(min=0, help="Factor for all lengths, for models with a short context.")] = 1.0,
    peer: Peer = None,
    site: Site = None,
    repeats: Repeats = 1,
    api_key: ApiKey = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Replay a recorded request stream, open loop: TTFT, ITL, throughput and cached tokens, also of a peer."""
    from kvasir.bench import replay

    check_output(output, make=True)
    table = {
        "file": str(file.name),
        "rate": rate,
        "share": share,
        "arrivals": arrivals,
        "num_requests": num_requests,
        "seconds": seconds,
        "clip": clip,
        "scale": scale,
    }
    load = replay.Load.of(file.name.split(".")[0], table)
    model, settings = _given(model, options)
    if url:
        given = {"peer": peer, "shape": shape, "model": model}
        if told := [*(name for name in given if given[name]), *settings]:
            raise ConfigError(
                f"{told[0]} is for a server that is started here, but --url names a running one: leave one of them out"
            )
        replay.run_url(load, url, data=file.parent, repeats=repeats, api_key=api_key, output=output, commit=commit)
        return
    replay.run_load(
        load,
        settings,
        model=model,
        shape=shape,
        peer=peer,
        site=site,
        data=file.parent,
        repeats=repeats,
        capacity=capacity,
        output=output,
        commit=commit,
    )


@app.command("startup", cls=Command)
@with_settings(EngineConfig, skip=("model",))
def startup(
    model: Model = "",
    shape: Shape = None,
    on_disk: Annotated[
        bool,
        typer.Option("--on-disk", help="Write the shape's random weights to disk and load them from there."),
    ] = False,
    peer: Annotated[str | None, typer.Option(help="Server to compare with, started in turns with ours: vllm.")] = None,
    site: Site = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure the time from starting a server to its first token, with a breakdown. The first start is the coldest."""
    from kvasir.bench import startup as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        _given(model, options)[1],
        shape=shape,
        repeats=repeats,
        output=output,
        on_disk=on_disk,
        peer=peer,
        site=site,
        commit=commit,
    )


@app.command("ladder", cls=Command)
@with_settings(EngineConfig, skip=("model",))
def ladder(
    model: Model = "",
    shape: Shape = None,
    workload: Workloads = None,
    repeats: Repeats = 5,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure what each optimisation adds, from everything off to everything on, one switch at a time."""
    from kvasir.bench import ladder as command

    check_output(output, make=True)
    model, settings = _given(model, options)
    command.run(settings, model=model, shape=shape, workloads=workload, repeats=repeats, output=output, commit=commit)


@app.command("profile", cls=Command)
@with_settings(EngineConfig, skip=("model",))
def profile(
    model: Model = "",
    shape: Shape = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences that decode.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 1024,
    mixed: Annotated[
        int, typer.Option(min=0, help="Tokens of a new prompt that each step computes in addition to the decodes.")
    ] = 0,
    repeats: Repeats = 5,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Profile one decode step: kernels by time, and the share of it in which the GPU is idle."""
    from kvasir.bench import profile as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        batch=batch,
        prompt=prompt,
        repeats=repeats,
        output=output,
        commit=commit,
        mixed=mixed,
    )


@app.command("speculation", cls=Command)
@with_settings(EngineConfig, skip=("model", "drafter", "draft_control"))
def speculation(
    model: Model = "",
    shape: Shape = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Drafter; repeatable; default: ngram, suffix.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Task of the lab; repeatable; default: four of them.")
    ] = None,
    accept: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="With --shape: acceptance rate to simulate on replayed outputs; repeatable."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; default: 4; repeatable with --shape.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Problems per task.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="With --shape: tokens per prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per output.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the lab's tasks; 0 is greedy.")] = 0.0,
    host: Annotated[
        bool, typer.Option("--host", help="Measure only the drafters: their time per step and memory on the host.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="With --host: number of tokens to read.")] = 1_000_000,
    seconds: Annotated[
        float, typer.Option(min=1, help="With --shape: leave out the fixed depths after this many seconds.")
    ] = 300.0,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure drafts: forwards, acceptance by depth and tokens per second, compared with the engine without drafts."""
    from kvasir.bench import drafting_host
    from kvasir.bench import speculation as command

    check_output(output, make=True)
    if host:
        drafting_host.run(
            model, drafters=drafter, tasks=task, batches=batch or [256], num_tokens=tokens, output=output, commit=commit
        )
        return
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        drafters=drafter,
        tasks=task,
        accepts=accept,
        batch=batch or [4],
        count=count,
        prompt=prompt,
        output_tokens=output_tokens,
        temperature=temperature,
        repeats=repeats,
        seconds=seconds,
        output=output,
        commit=commit,
    )


@app.command("rollouts", cls=Command)
@with_settings(EngineConfig, skip=("model", "drafter", "draft_control", "max_draft_tokens"))
def rollouts(
    model: Annotated[str, typer.Option(help="Checkpoint folder or name.")] = "base",
    problems: Annotated[int, typer.Option(min=1, help="Number of problems, the same in every round.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples per problem, at temperature 1.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 5,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Task of the lab; repeatable; default: four of them.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per sample.")] = 512,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", help="Weights of one round; repeatable; default: the model's in all rounds."),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            min=0, help="Noise to add to every matrix each round, as a share of its spread: a stand-in for training."
        ),
    ] = 0.0,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="Arm to run in addition to plain; repeatable; default: all.")
    ] = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure rollouts of reinforcement learning over rounds: forwards and makespan, with and without drafts."""
    from kvasir.bench import rollouts as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        problems=problems,
        samples=samples,
        rounds=rounds,
        tasks=task,
        max_tokens=output_tokens,
        checkpoints=checkpoint or [],
        noise=noise,
        only=arm,
        output=output,
        commit=commit,
    )


@app.command("merge", cls=Command)
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Results of one case.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the merged result.")],
) -> None:
    """Merge several runs of one case into one result."""
    from kvasir.bench import merge as command
    from kvasir.bench.result import write_json

    check_output(output, make=True)
    write_json(output, command.merge([command.load(f) for f in files]))


@app.command("report", cls=Command)
def report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Results that --json wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Render results as one HTML page with tables and plots."""
    from kvasir.bench import report as command

    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"the report is HTML; {output.name} does not end in .html")
    check_output(output, make=True)
    command.run(files, output)


@app.command("plot", cls=Command)
def plot(
    files: Annotated[
        list[Path], typer.Argument(metavar="RESULT...", help="Results that --json or tools/kv_quality.py wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the PNG files.")] = Path(
        "docs/methods/img"
    ),
) -> None:
    """Draw the curves in results: decode rates by context length, answers by the size of outliers."""
    from kvasir.bench import plots

    for file in plots.run(files, output):
        typer.echo(file)


@app.command("pages", cls=Command)
def pages(
    root: Annotated[Path, typer.Option(help="The root of the repository.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a page and its results differ.")
    ] = False,
) -> None:
    """Write the tables of figures in README and docs from the results in bench/results."""
    from kvasir.bench import pages as command

    changed = command.run(root, check=check)
    for file in changed:
        typer.echo(file)
    if check and changed:
        raise ConfigError("these pages differ from their results: run 'kvasir bench pages'")
