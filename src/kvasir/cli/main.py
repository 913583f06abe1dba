"""The ``kvasir`` command. A command imports its work when it runs, so ``kvasir --help`` needs no torch."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvasir import __version__
from kvasir.cli.bench_turns import app as bench  # with the commands of all bench_*.py
from kvasir.cli.cluster import app as cluster
from kvasir.cli.lab import app as lab
from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.cli.train import app as train
from kvasir.config import CacheConfig, EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from kvasir.logs import setup
from kvasir.technique import names

# Errors of a disk that takes no more, at whatever file a command meets them.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

# Plain help: the boxes of typer's rich help cut off long option names in a terminal of 80 columns.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "An LLM inference engine in which every efficiency method is a switch.\n\n"
        "`kvasir serve` starts an OpenAI-compatible server on http://127.0.0.1:8000 with the model that ships in the "
        "package; `kvasir serve MODEL` serves a checkpoint folder or a hub id."
    ),
)
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")
app.add_typer(lab, name="lab")
app.add_typer(train, name="train")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Checkpoint folder or hub id; default: the model that ships in the package.",
    ),
]
CONVERTER_HELP = "Converter and its options, e.g. outlier_twin:keys=16. Converters: " + ", ".join(
    names("kvasir.convert.converters")
)
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
        str | None, typer.Option(help="Running server to talk to instead, e.g. http://127.0.0.1:8000.")
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
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Prompt to complete.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="File with one prompt, or .jsonl with one request per line; - is stdin."),
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read the input as JSON lines, whatever its name.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines to this file instead of text to stdout.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="File for the lines of a batch that failed; default: the output.")
    ] = None,
    max_output_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of an answer in a batch, whatever its line asks for; 0: no limit.")
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send a single prompt through the chat template, or as it is; default: through the template where the "
            "model has one.",
            show_default=False,
        ),
    ] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    params: Annotated[
        str | None, typer.Option(help='Other sampling parameters as JSON, e.g. \'{"top_p": 0.9, "seed": 7}\'.')
    ] = None,
    data_parallel_size: Replicas = 1,
    **options: Any,
) -> None:
    """Answer a prompt from the command line or a file, or many.

    A single prompt is a user's message where the model has a chat template; --raw continues the text instead. A line of
    JSON is {"prompt": "..."}, {"messages": [...]} or {"prompt_token_ids": [...]}, plus any sampling parameter. A line
    that cannot be served gives a line with "error" and exit code 3, and does not stop the others. Answers are written
    in order as they finish; an interrupt keeps all finished ones.

    A file in OpenAI's batch format (custom_id, method, url, body) is answered in that format. Run again with the same
    --output, it skips what is answered there and tries the rest.
    """
    from kvasir.cli import generate as command

    check_output(output)
    check_output(errors)
    shared = command.parse_params(params) | _given(temperature=temperature, max_tokens=max_tokens)
    config = build_settings({"model": model, **options}, EngineConfig)
    command.run(
        config,
        prompt=prompt,
        source=file,
        jsonl=jsonl,
        output=output,
        shared=shared,
        chat=chat,
        errors=errors,
        max_output_tokens=max_output_tokens,
        replicas=data_parallel_size,
    )


@app.command(cls=Command)
def doctor(as_json: AsJSON = False) -> None:
    """Say what this machine and installation can do. Slower fallbacks come with their reasons."""
    from kvasir.cli import doctor as command

    command.run(as_json)


@app.command(cls=Command)
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


@app.command("eval", cls=Command)
@with_settings(EngineConfig, skip=("model", "seed"))
def evaluate(
    model: Model = "",
    tasks: Annotated[
        str, typer.Option(help="Tasks with their dials, e.g. chain,needle or chain:max_steps=8,path.")
    ] = "chain",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Problems per task.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and sampling.")] = 7,
    split: Annotated[
        str, typer.Option(help="Split of the task: test, validation, train, or longer (sizes never trained on).")
    ] = "test",
    form: Annotated[str, typer.Option(help="Prompt form; `kvasir lab tasks` lists them.")] = "solve",
    samples: Annotated[int, typer.Option(min=1, help="Replies per problem, for pass@k and majority@k.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature; 0 is greedy; default: greedy for one reply, else 0.8."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per reply; default: twice the longest solution, plus 32.")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="With --form (one or several): give it the model's own candidates.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="Engine switches of a second configuration to compare with, in quotes.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.")] = None,
    **options: Any,
) -> None:
    """Measure answer quality on the lab's tasks.

    Reports exact match, tokens and perplexity of one configuration, or compares two.
    """
    from kvasir.cli import eval as command
    from kvasir.lab.evaluation.evaluator import Plan

    check_output(output, make=True)
    check_output(plot, make=True)
    names = command.split_tasks(tasks)
    plan = Plan(names, count, seed, split, form, samples, temperature, max_tokens, own)  # type: ignore[arg-type]
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
            help="report FILES: write a page with plots from earlier results.",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="Strategy (`kvasir doctor` lists them), e.g. majority:n=8; repeatable, to compare several.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Model, or URL#NAME of a server, with replicas joined by commas; repeatable, cheapest first.",
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Task with its dials, e.g. countdown or chain:max_steps=8.")] = "countdown",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of problems.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and sampling.")] = 7,
    split: Annotated[
        str, typer.Option(help="Split of the task: test, validation, train, or longer (sizes never trained on).")
    ] = "test",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per reply; default: from the task's longest solution.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of all replies except verdicts.")
    ] = 1.0,
    price: Annotated[
        list[str] | None,
        typer.Option(help="Price as MODEL=PROMPT/CACHED/GENERATED, in dollars per million tokens; repeatable."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Budget of a strategy's whole run: tokens=,generated=,dollars=,calls=.")
    ] = None,
    problem_budget: Annotated[str | None, typer.Option(help="Budget of each problem, in the same units.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="File that keeps every call; after a kill the same command continues.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Problems solved at the same time.")] = 16,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no further strategy after this many minutes.")
    ] = None,
    pool: Annotated[
        int, typer.Option(min=0, help="Draw this many replies per problem once, and share them among all strategies.")
    ] = 0,
    resamples: Annotated[
        int, typer.Option(min=1, help="With --pool: number of random orders in which the replies are dealt out.")
    ] = 4,
    pool_file: Annotated[
        Path | None, typer.Option(help="With --pool: prefix of the files that keep the replies for later runs.")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate",
            help="Measure what each feature of the engine is worth: one removed at a time, and all over HTTP.",
        ),
    ] = False,
    page: Annotated[
        Path, typer.Option(help="With report: the Markdown file to write; its pictures go to the same folder.")
    ] = Path("solve-report.md"),
    together: Annotated[
        bool, typer.Option("--together", help="With report: put all files into one table and pool their seeds.")
    ] = False,
    data_parallel_size: Replicas = 1,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    **options: Any,
) -> None:
    """Solve problems with test-time scaling strategies.

    A strategy spends more inference on each problem; the result compares accuracy and cost.
    """
    from kvasir.cli import solve as command
    from kvasir.cli.solve_job import Job, parse_amounts, parse_prices

    check_output(output, make=True)
    if words:
        if words[0] != "report":
            raise ConfigError(
                f"kvasir solve {words[0]}: the only subcommand is 'report FILES'. Give a task as --task {words[0]}"
            )
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
        data_parallel_size,
    )
    if ablate and (pool or journal):
        raise ConfigError("--ablate measures running engines, which --pool and --journal bypass: leave them out")
    command.run(build_settings(options, EngineConfig), job, output, ablate)


@app.command(cls=Command)
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


def main() -> None:
    """Run the command line. Errors of configuration and requests, and a disk that takes no more, become one message and
    an exit code, not a traceback.

    Exit codes: 0 done, 2 the configuration or the command line is wrong, 3 a request was refused, 130 interrupted.
    """
    setup()
    try:
        app(prog_name="kvasir")
    except ConfigError as e:
        _fail(str(e), 2)
    except RequestError as e:
        _fail(e.message + (f" ({e.param})" if e.param and e.param not in e.message else ""), 3)
    except OSError as e:
        if e.errno not in NO_ROOM:
            raise
        file = f" {e.filename}" if e.filename else ""
        _fail(f"cannot write{file}: {e.strerror}. Make room or name another place, and run the command again", 2)


def _fail(message: str, code: int) -> None:
    typer.secho(f"error: {message}", fg="red", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
