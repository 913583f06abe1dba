"""``kvasir lab show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvasir.cli.command import command
from kvasir.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

    from kvasir_lab.task import Problem, Task

# Characters of a long text that are shown, half from each end.
SHOWN = 1600
COLOURS = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


@command(40)
def show(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="Task, with dials if you like: chain, chain:max_steps=8, judge_pair/chain."
        ),
    ],
    form: Annotated[
        str, typer.Option(help="Prompt form: solve, aggregate, judge_one, judge_pair, self_evaluate, refine.")
    ] = "solve",
    split: Annotated[
        str, typer.Option(help="Split of the task: train, validation, test, or longer (sizes never trained on).")
    ] = "test",
    count: Annotated[int, typer.Option("-n", min=1, help="Number of samples.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 7,
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False,
) -> None:
    """Show samples of a task: conversation, solution, answer and token counts."""
    from rich.console import Console

    from kvasir_lab.lookup import load_task
    from kvasir_lab.task import SPLITS
    from kvasir_lab.tokenizer import shipped_tokenizer

    if split not in SPLITS:
        raise ConfigError(f"no split named '{split}'; there are {', '.join(SPLITS)}.{nearest(split, SPLITS)}")
    if form != "solve" and "/" in task:
        raise ConfigError(f"'{task}' names a prompt form already: leave out --form {form}")
    name = task if form == "solve" else f"{form}/{task}"
    chosen = load_task(name)
    console, tokenizer = Console(highlight=False), shipped_tokenizer()
    for i, problem in enumerate(chosen.problems(split, seed, count)):  # type: ignore[arg-type]
        if i:
            console.print()
        _show_one(console, tokenizer, chosen, problem, f"{name} · {split} · seed {seed} · {i + 1} of {count}", full)


def _show_one(console: Console, tokenizer: Tokenizer, task: Task, problem: Problem, title: str, full: bool) -> None:
    from rich.text import Text

    from kvasir_lab.forms import FormProblem

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    console.rule(Text(title, style="bold"), align="left")
    for message in problem.messages:
        _text(console, message["role"], message["content"], full)
    _text(console, "assistant", problem.solution, full)
    facts = [
        f"prompt {tokens(problem.prompt):,} tokens",
        f"reply {tokens(problem.solution):,} tokens",
        f"difficulty {problem.difficulty}",
    ]
    if problem.answer and problem.answer != problem.solution:
        facts.append(f"answer {problem.answer}")
    if isinstance(problem, FormProblem):
        facts.append("candidates " + " ".join("right" if ok else "wrong" for ok in problem.right))
    for line in facts, task.notes(problem):
        if line:
            console.print(Text(" · ".join(line), style="dim"), soft_wrap=True)


def _text(console: Console, role: str, text: str, full: bool) -> None:
    from rich.text import Text

    if not full and len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} [... {len(text) - SHOWN:,} characters ...] {text[-SHOWN // 2 :]}"
    console.print(Text(f"{role}: ", style=f"bold {COLOURS[role]}"), end="")
    console.print(Text(text), soft_wrap=True)
