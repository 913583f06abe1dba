"""``kvasir eval``: exact match, tokens and perplexity on the lab's tasks, of one configuration or of two compared."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvasir.cli.options import Command, with_settings
from kvasir.config import EngineConfig, read_toml
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.progress import loading

if TYPE_CHECKING:
    from kvasir_lab.evaluation.evaluator import Exam, Outcome, Plan

# Name of the arm that holds the difference of two configurations.
DIFFERENCE = "difference"
# Most difficulties that are shown in the terminal.
MOST_GROUPS = 10
# Newer releases of typer carry their own copy of click; its exceptions live in the module of ``typer.BadParameter``.
ClickException = sys.modules[typer.BadParameter.__module__].ClickException


def split_tasks(text: str) -> tuple[str, ...]:
    """Split ``chain:modulus=11,max_steps=4,needle`` into two tasks: a piece with a value and no name belongs to the
    task before it."""
    found: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if found and ":" in found[-1] and "=" in piece and ":" not in piece.split("=")[0]:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return tuple(found)


def second_config(first: EngineConfig, switches: str) -> EngineConfig:
    """Copy ``first`` with the engine switches of a string, as on the command line (including ``--model NAME``).
    Raises ConfigError."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(cls=Command)
    @with_settings(EngineConfig, skip=("seed",))
    def against(**options: Any) -> dict[str, Any]:
        return options

    try:
        options = typer.main.get_command(app)(shlex.split(switches), prog_name="--against", standalone_mode=False)
    except (ClickException, ValueError) as e:  # ValueError: a quote that is not closed
        raise ConfigError(
            f"--against {switches!r}: {e.format_message() if isinstance(e, ClickException) else e}"
        ) from e
    if not isinstance(options, dict):
        raise ConfigError(f"--against {switches!r} holds no configuration")
    file = options.pop("config")
    config = first.replace(**(read_toml(file) if file else {}), **{k: v for k, v in options.items() if v is not None})
    if config == first:
        raise ConfigError(
            f"--against {switches!r} changes nothing: name a switch that differs, e.g. --against '--dtype bfloat16'"
        )
    return config


def run(config: EngineConfig, plan: Plan, *, against: str | None, output: Path | None, plot: Path | None) -> None:
    from kvasir.bench.result import arm, result, write_json
    from kvasir.models import checkpoint
    from kvasir_lab.evaluation import plots
    from kvasir_lab.evaluation.evaluator import prepare, read_tokenizer
    from kvasir_lab.evaluation.scores import compare, figures

    if plot is not None:
        plots.check()
    if plan.own and against:
        raise ConfigError(
            "--own and --against cannot be combined: two configurations write different candidates, so no problems "
            "could be paired"
        )
    configs = {config.model.model or "embedded": config} | (
        {against: second_config(config, against)} if against else {}
    )
    tokenizers = [
        read_tokenizer(checkpoint.resolve(c.model.tokenizer or c.model.model, c.model.revision))
        for c in configs.values()
    ]
    if any(t.get_vocab() != tokenizers[0].get_vocab() for t in tokenizers):
        raise ConfigError("the two configurations have different vocabularies: they cannot be given the same prompts")
    exams = prepare(plan, tokenizers[0])
    outcomes: dict[str, list[Outcome]] = {}

    def so_far() -> dict[str, Any]:
        """The result of the finished tasks; a second configuration counts once it has all of them."""
        first, *others = outcomes.values()
        arms = [
            arm(
                name,
                {"plan": _described(plan), **_changes(configs[name])},
                {o.exam.spec: figures(o, plan.seed) for o in found},
            )
            for name, found in outcomes.items()
            if len(found) == len(first)
        ]
        if len(arms) == 2:
            pairs = zip(first, *others, strict=True)
            arms.append(arm(DIFFERENCE, {"second": against}, {a.exam.spec: compare(a, b, plan.seed) for a, b in pairs}))
        return result(f"eval-{config.model.model.rstrip('/').rsplit('/', 1)[-1] or 'embedded'}", arms)

    try:
        for name, c in configs.items():
            for done in _answer(c, exams, plan, tokenizers[0]):
                outcomes[name] = [*outcomes.get(name, ()), *done]
                if output is not None:
                    write_json(output, so_far())
    finally:  # after a fault or an interrupt, too: show the finished tasks
        if outcomes:
            show(outcome := so_far())
            if plot is not None:
                plots.draw(outcome, plot)


def _answer(config: EngineConfig, exams: Sequence[Exam], plan: Plan, tokenizer: Any) -> Iterator[list[Outcome]]:
    """Run the exams and yield the outcomes of each when it is done."""
    from kvasir.api.offline.llm import LLM
    from kvasir_lab.evaluation.evaluator import run as put
    from kvasir_lab.evaluation.evaluator import run_own

    with loading(config.model.model):
        llm = LLM(config=config)
    with llm:
        for exam in exams:
            log.info("%s: %d problems of %s", config.model.model or "embedded", len(exam.prompts), exam.spec)
            if plan.own:
                yield run_own(llm, exam, plan, tokenizer, progress=sys.stdout.isatty())
            else:
                yield [put(llm, exam, plan, tokenizer, progress=sys.stdout.isatty())]


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "tasks": list(plan.tasks),
        "form": plan.form,
        "split": plan.split,
        "n": plan.count,
        "seed": plan.seed,
        "samples": plan.samples,
        "temperature": plan.heat,
        "max_tokens": plan.max_tokens,
        "own": plan.own,
    }


def _changes(config: EngineConfig) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    import dataclasses

    found = {}
    for section in dataclasses.fields(config):
        mine, usual = getattr(config, section.name), getattr(EngineConfig(), section.name)
        found |= {
            f.name: getattr(mine, f.name)
            for f in dataclasses.fields(mine)
            if getattr(mine, f.name) != getattr(usual, f.name)
        }
    return found


def show(outcome: dict[str, Any]) -> None:
    """Print the tables of every task, and the difference if there are two configurations, called A and B."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    arms = {letter: a for letter, a in zip("AB", (a for a in outcome["arms"] if a["name"] != DIFFERENCE))}
    for letter, entry in arms.items():
        console.print(f"{letter}: {entry['name']}")
    for task in arms["A"]["metrics"]:
        console.print(f"\n{task}", style="bold")
        for table in _tables({letter: entry["metrics"][task] for letter, entry in arms.items()}):
            console.print(table)
        if len(arms) == 2:
            console.print(_difference(outcome["arms"][-1]["metrics"][task]))


def _tables(metrics: dict[str, dict[str, Any]]) -> list[Any]:
    """Tables of one task, with a row per configuration. ``tokens``: per reply. ``source``: bits per byte that the known
    source of the text needs."""
    answers = _table("exact %", "95 %", "problems", "tokens", "cut", "s")
    losses = _table("perplexity", "bits a byte", "95 %", "source", "documents")
    groups = _table("difficulty", "exact %", "95 %", "problems", "alone %")
    pools = _table("k", "pass@k %", "95 %", "majority@k %", "95 %")
    for letter, m in metrics.items():
        if "perplexity" in m:
            source = f"{m['source_bits_per_byte']:.4f}" if "source_bits_per_byte" in m else "unknown"
            losses.add_row(
                letter,
                f"{m['perplexity']:.3f}",
                f"{m['bits_per_byte']:.4f}",
                _bounds(m["interval"], ".4f"),
                source,
                f"{m['documents']:,}",
            )
            continue
        answers.add_row(
            letter,
            f"{100 * m['exact']:.2f}",
            _percents(m["interval"]),
            f"{m['problems']:,}",
            f"{m['tokens_per_reply']:.1f}",
            f"{m['cut_replies']}",
            f"{m['seconds']:.1f}",
        )
        for difficulty, group in m["by_difficulty"].items():
            groups.add_row(
                letter,
                difficulty,
                f"{100 * group['exact']:.2f}",
                _percents(group["interval"]),
                f"{group['problems']:,}",
                f"{100 * group['alone']:.2f}" if "alone" in group else "",
            )
        for k, passed in m.get("pass", {}).items():
            vote = m.get("majority", {}).get(k)
            pools.add_row(
                letter,
                k,
                f"{100 * passed['share']:.2f}",
                _percents(passed["interval"]),
                *([f"{100 * vote['share']:.2f}", _percents(vote["interval"])] if vote else ["no votes", ""]),
            )
    # A table of one difficulty tells nothing, and more than MOST_GROUPS are left to the JSON file.
    shown = [
        answers,
        losses,
        *([groups] if len(metrics) < groups.row_count <= MOST_GROUPS * len(metrics) else []),
        pools,
    ]
    return [table for table in shown if table.row_count]


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    for name in ("", *columns):
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _difference(m: dict[str, Any]) -> str:
    """B minus A on one task, in words."""
    if m["unit"] == "bits per byte":
        text = f"B - A: {m['difference']:+.5f} bits a byte (95 % {_bounds(m['interval'], '+.5f')}; less is better)"
        needed, what = m["documents_needed"], "documents"
    else:
        text = (
            f"B - A: {100 * m['difference']:+.2f} points (95 % {_percents(m['interval'], '+')}), "
            f"{m['extra_tokens_per_reply']:+.1f} tokens a reply"
        )
        if "mcnemar_p" in m:
            text += (
                f"; right in A only {m['only_first']}, in B only {m['only_second']}, McNemar p = {m['mcnemar_p']:.3g}"
            )
        needed, what = m["problems_needed"], "problems"
    return text + ("." if needed is None else f". To see such a difference with 80 % power takes {needed:,} {what}.")


def _percents(interval: Sequence[float], sign: str = "") -> str:
    return _bounds([100 * b for b in interval], f"{sign}.2f")


def _bounds(interval: Sequence[float], form: str) -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}"
