"""The ``kvasir`` command. Each command's work is imported when it runs: ``kvasir --help`` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvasir import __version__
from kvasir.cli.bench import app as bench
from kvasir.cli.lab import app as lab
from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.cli.train import app as train
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from kvasir.logs import setup

# Plain help: the boxes of typer's rich help cut long option names off in a terminal of 80 columns.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "An LLM inference engine in which every efficiency method is a switch.\n\n"
        "`kvasir serve` starts an OpenAI-compatible server on http://127.0.0.1:8000 with the model in the package; "
        "`kvasir serve MODEL` serves a checkpoint folder or a hub id."
    ),
)
app.add_typer(bench, name="bench")
app.add_typer(lab, name="lab")
app.add_typer(train, name="train")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False, help="Checkpoint folder or hub id; empty: the model in the package."
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's, else 1.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens an answer.")]
ApiKey = Annotated[str | None, typer.Option(envvar="KVASIR_API_KEY", help="The server's key.")]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
@with_settings(Settings, skip=("model",))
def serve(model: Model = "", **options: Any) -> None:
    """Serve a model over the OpenAI API."""
    from kvasir.cli import serve as command

    command.run(build_settings({"model": model, **options}))


@app.command(cls=Command)
@with_settings(EngineConfig, skip=("model",))
def chat(
    model: Model = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to a running server instead, e.g. http://127.0.0.1:8000.")
    ] = None,
    api_key: ApiKey = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    **options: Any,
) -> None:
    """Talk to a model in the terminal."""
    from kvasir.cli import chat as command

    sampling = _given(temperature=temperature, max_tokens=max_tokens)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        system=system,
        url=url,
        api_key=api_key,
        sampling=sampling,
    )


@app.command(cls=Command)
@with_settings(EngineConfig, skip=("model", "seed"))
def generate(
    model: Model = "",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="A prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--input", "-i", help="Text file, or .jsonl (a request a line); - is stdin.")
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="The input is JSON lines, whatever its name.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here instead of text to stdout.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the chat template.")] = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    params: Annotated[
        str | None, typer.Option(help='More sampling parameters as JSON, e.g. \'{"top_p": 0.9, "seed": 7}\'.')
    ] = None,
    **options: Any,
) -> None:
    """Complete prompts from the command line or a file.

    A line of JSON is {"prompt": "..."}, {"messages": [...]} or {"prompt_token_ids": [...]}, plus any sampling parameter.
    Lines that cannot be served give a line with "error" and the exit code 3; the others go on. Answers are written in order as they are
    done; an interrupt keeps every finished one.
    """
    from kvasir.cli import generate as command

    check_output(output)
    shared = command.parse_params(params) | _given(temperature=temperature, max_tokens=max_tokens)
    config = build_settings({"model": model, **options}, EngineConfig)
    command.run(config, prompt=prompt, source=file, jsonl=jsonl, output=output, shared=shared, chat=chat)


@app.command(cls=Command)
def doctor(as_json: AsJSON = False) -> None:
    """Say what this machine and installation can do, what falls back, and why."""
    from kvasir.cli import doctor as command

    command.run(as_json)


@app.command(cls=Command)
def show(
    model: Model = "",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of weights and KV.")
    ] = "bfloat16",
    memory_gib: Annotated[
        float | None, typer.Option("--memory", min=0, help="GiB to plan for; default: this machine and common GPUs.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Show a model: layers, bytes per token, and what fits where."""
    from kvasir.cli import show as command

    command.run(model, dtype, memory_gib, as_json)


@app.command("eval", cls=Command)
@with_settings(EngineConfig, skip=("model", "seed"))
def evaluate(
    model: Model = "",
    tasks: Annotated[str, typer.Option(help="Tasks and dials: chain,needle or chain:max_steps=8,path.")] = "chain",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Problems of each task.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Decides problems and noise.")] = 7,
    split: Annotated[str, typer.Option(help="test, validation, train, or longer (sizes never trained on).")] = "test",
    form: Annotated[str, typer.Option(help="Prompt form: solve, aggregate, judge_one, judge_pair, ...")] = "solve",
    samples: Annotated[int, typer.Option(min=1, help="Replies a problem, for pass@k and majority@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: greedy for one reply, else 0.8.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a reply; default: twice the longest solution and 32.")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="With --form, several too: on the model's own candidates.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="A second configuration on the same problems: more switches, in quotes.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.")] = None,
    **options: Any,
) -> None:
    """Measure quality through the engine: exact match, tokens and perplexity on the lab's tasks, alone or against other switches."""
    from kvasir.cli import eval as command
    from kvasir.lab.evaluation.evaluator import Plan

    check_output(output, make=True)
    check_output(plot, make=True)
    plan = Plan(command.split_tasks(tasks), count, seed, split, form, samples, temperature, max_tokens, own)  # type: ignore[arg-type]
    command.run(
        build_settings({"model": model, **options}, EngineConfig), plan, against=against, output=output, plot=plot
    )


@app.command(cls=Command)
@with_settings(EngineConfig, skip=("model", "seed", "tokenizer", "revision", "journal"))
def solve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[report FILES...]",
            show_default=False,
            help="report: write a page with plots from earlier results.",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="A strategy, e.g. squeeze_evolve:N=8,K=3,T=4; several are compared."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="A model, or URL#NAME of a server, replicas joined by commas; several: cheapest first."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="A task and its dial, e.g. countdown or chain:max_steps=8.")] = "countdown",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Problems.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Decides problems and noise.")] = 7,
    split: Annotated[str, typer.Option(help="test, validation, train, or longer (sizes never trained on).")] = "test",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a reply; default: by the task's longest solution.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of every sample that is not a verdict.")] = 1.0,
    price: Annotated[
        list[str] | None, typer.Option(help="MODEL=PROMPT/CACHED/GENERATED, dollars per million tokens.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Of a strategy's whole run: tokens=,generated=,dollars=,calls=.")
    ] = None,
    problem_budget: Annotated[str | None, typer.Option(help="Of each problem, in the same units.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Keep every call here; the same command goes on after a kill.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Problems under way at once.")] = 16,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no further strategy after so many minutes.")
    ] = None,
    pool: Annotated[int, typer.Option(min=0, help="Draw so many replies a problem, once for all strategies.")] = 0,
    resamples: Annotated[int, typer.Option(min=1, help="With --pool: deal them out so many times.")] = 4,
    pool_file: Annotated[
        Path | None, typer.Option(help="With --pool: files that begin so keep the replies for another time.")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate",
            help="Take away one feature of the engine after the other, and go over HTTP: what is each worth?",
        ),
    ] = False,
    page: Annotated[
        Path, typer.Option(help="With report: the Markdown file to write; pictures stand beside it.")
    ] = Path("solve-report.md"),
    together: Annotated[
        bool, typer.Option("--together", help="With report: one table of all files, their seeds pooled.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    **options: Any,
) -> None:
    """Spend more inference on each problem, by a strategy, and compare what accuracy costs."""
    from kvasir.cli import solve as command
    from kvasir.cli.solve_job import Job, parse_amounts, parse_prices

    check_output(output, make=True)
    if words:
        if words[0] != "report":
            raise ConfigError(f"kvasir solve {words[0]}: there is 'report FILES'; a task is given as --task {words[0]}")
        from kvasir.bench import solve_report

        check_output(page, make=True)
        solve_report.run([Path(word) for word in words[1:]], page, together)
        return
    job = Job(
        tuple(strategies or ()),
        tuple(models or ("",)),
        task,
        count,
        seed,
        split,
        max_tokens,
        temperature,  # type: ignore[arg-type]
        parse_prices(price or ()),
        parse_amounts(budget, "--budget"),
        parse_amounts(problem_budget, "--problem-budget"),
        journal,
        at_once,
        minutes,
        pool,
        resamples,
        pool_file,
    )
    if ablate and (pool or journal):
        raise ConfigError("--ablate measures engines at work: leave --pool and --journal out")
    command.run(build_settings(options, EngineConfig), job, output, ablate)


@app.command(cls=Command)
def convert(
    converter: Annotated[str, typer.Argument(metavar="NAME:KEY=VALUE", help="A converter, e.g. outlier_twin:keys=16.")],
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model to convert: a folder, a name or a hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New folder.")],
) -> None:
    """Rewrite a checkpoint folder with a converter."""
    from kvasir.cli import convert as command

    command.run(converter, source, target)


def main() -> None:
    """Entry point: set-up and request errors become one clear message and an exit code, never a traceback.

    Exit codes: 0 done, 2 the set-up or the command line is wrong, 3 a request was refused, 130 interrupted.
    """
    setup()
    try:
        app(prog_name="kvasir")
    except ConfigError as e:
        _fail(str(e), 2)
    except RequestError as e:
        _fail(e.message + (f" ({e.param})" if e.param and e.param not in e.message else ""), 3)


def _fail(message: str, code: int) -> None:
    typer.secho(f"error: {message}", fg="red", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
