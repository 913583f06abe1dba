"""Measure steering: CREST and its controls on traces with needless checks, and edits of style.

    python -m kvasir_lab.studies steer_study OUT.json [--parts model twin style]
        [--problems 1000 --seeds 3 --device cuda]

Two models: one (``--model``), and a *twin* of it that re-checks half of its right steps, which a LoRA of
``reflect:needless=0.5`` teaches in minutes and `merge_lora` makes a model of. On each: no hook, CREST at several
turns, random directions in the same heads, the same directions in other heads, the difference of the means added
instead of a turn, a bias on the word that begins a check at equal tokens, and the folded model. Every arm draws with
the same seeds at temperature 1. Then a model that was taught the style task: problems in any style, edited towards
each. The parts need nothing of each other, so they may run side by side, each with its own OUT.json.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from kvasir import LLM, SamplingParams
from kvasir.bench.result import arm
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.hooks.hook import Hook, HookSet, read_set, write_set
from kvasir.models import checkpoint
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters.training import Plan as Training
from kvasir_lab.adapters.training import train
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.evaluator import noise_seed
from kvasir_lab.evaluation.statistics import wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.steer import crest, styles
from kvasir_lab.study import Report, study

TURNS = (-1.0, -2.0, -4.0)
WORD = "Wait"
TWIN, STYLE = "reflect:needless=0.5", "style"
MAX_NEW = 512
STYLES = styles.STYLES
PARTS = ("model", "twin", "style")


def taught(folder: Path, model: str, task: str, name: str, options: argparse.Namespace) -> tuple[str, dict]:
    """A copy of ``model`` that a LoRA of ``task`` was merged into, and the record of its training."""
    source = checkpoint.resolve(model)
    plan = Training("lora", task, rank=16, steps=options.steps, rows=options.rows)
    record = train(plan, source, folder / f"{name}-trained", device=options.device or default_device())
    made = source
    for spec in (
        f"to_lora:method=lora,trained={folder / f'{name}-trained'}",
        f"merge_lora:adapter={folder / f'{name}-lora'}",
    ):
        made = folder / (f"{name}-lora" if spec.startswith("to_lora") else name)
        convert(load_converter(spec), spec, source, made)
    return str(made), record


def changed(one: HookSet, out: Path, **tensors: Any) -> Path:
    """A copy of a set of one hook whose tensors of these names are made by functions of the old ones."""
    found = {name: tensors.get(name.split(".")[-1], lambda x: x)(x) for name, x in one.tensors.items()}
    return write_set(out, list(one.hooks), found, one.made)


def controls(folder: Path, own: Path) -> dict[str, Path]:
    """The sets of an engine: CREST at TURNS, always open, random directions, and the directions in other heads."""
    one, generator = read_set("crest", own), torch.Generator().manual_seed(1)
    hook, sets = one.hooks[0], {}
    for c in TURNS:
        op = hook.op.replace("c=-1.0", f"c={c}")
        sets[f"crest c={c:g}"] = write_set(folder / f"c{c:g}", [replace(hook, op=op)], one.tensors, one.made)
    always = replace(hook, op=f"rotate:c={TURNS[1]},gate=all")
    sets["crest without a probe"] = write_set(folder / "always", [always], one.tensors, one.made)
    strong = replace(hook, op=hook.op.replace("c=-1.0", f"c={TURNS[1]}"))
    like = HookSet("x", "", (strong,), one.tensors, "", one.made)
    sets["random directions"] = changed(
        like, folder / "random", direction=lambda x: torch.randn(x.shape, generator=generator)
    )
    sets["other heads"] = others(one, strong, folder / "others", generator)
    moved = {name: x.clone() for name, x in one.tensors.items()}
    for name in [name for name in moved if name.endswith(".direction")]:
        layer = name.removesuffix("direction")
        moved[name] *= -(moved[f"{layer}gap"] * moved[f"{layer}heads"])[:, None]
    sets["moved by the gap"] = write_set(folder / "gap", [replace(hook, op="add")], moved, one.made)
    return sets


def others(one: HookSet, hook: Hook, out: Path, generator: torch.Generator) -> Path:
    """The same directions with their probes, each in a head that is drawn at random from the chosen layers'."""
    names = [name for name in one.tensors if name.endswith(".direction")]
    layers = [name.split(".")[1] for name in names]
    directions = torch.cat([one.tensors[name] for name in names])
    chosen = torch.cat([one.tensors[f"{crest.PARAMS}.{layer}.heads"] for layer in layers]) > 0
    heads = len(one.tensors[names[0]])
    places = torch.randperm(len(chosen), generator=generator)[: int(chosen.sum())]
    moved = {"direction": torch.zeros_like(directions), "heads": torch.zeros(len(chosen))}
    moved["direction"][places], moved["heads"][places] = directions[chosen], torch.ones(len(places))
    for name in ("probe", "bias"):
        whole = torch.cat([one.tensors[f"{crest.PARAMS}.{layer}.{name}"] for layer in layers])
        moved[name] = torch.zeros_like(whole)
        moved[name][places] = whole[chosen]
    tensors = {
        f"{crest.PARAMS}.{layer}.{name}": x[i * heads : (i + 1) * heads]
        for name, x in moved.items()
        for i, layer in enumerate(layers)
    }
    return write_set(out, [hook], tensors, one.made)


class Asked:
    """One engine and the problems of a task, with the prompts and noise that all arms share."""

    def __init__(self, llm: LLM, spec: str, options: argparse.Namespace, count: int | None = None) -> None:
        self.llm, self.task = llm, load_task(spec)
        self.tokenizer = lab_tokenizer.load(checkpoint.resolve(llm.config.model.model))
        self.problems = self.task.problems("test", 0, count or options.problems)
        coded = self.tokenizer.encode_batch_fast([p.prompt for p in self.problems], add_special_tokens=False)
        self.prompts = [{"prompt_token_ids": e.ids} for e in coded]
        self.stops = tuple(self.tokenizer.token_to_id(t) for t in lab_tokenizer.STOPS)
        self.spec = spec

    def replies(self, seed: int, **params: Any) -> tuple[list[str], list[int]]:
        """One reply to each problem at temperature 1, and their lengths in tokens."""
        many = [
            SamplingParams(
                temperature=1.0,
                seed=noise_seed(seed, self.spec, i),
                stop_token_ids=self.stops,
                max_tokens=min(MAX_NEW, self.llm.info.max_model_len - len(p["prompt_token_ids"])),
                detokenize=False,
                **params,
            )
            for i, p in enumerate(self.prompts)
        ]
        outputs = [output.outputs[0].token_ids for output in self.llm.generate(self.prompts, many)]
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs], list(map(len, outputs))

    def measure(self, name: str, seeds: int, config: dict | None = None, **params: Any) -> dict:
        """An arm: tokens, right answers and checks over all seeds."""
        right = tokens = total = 0
        counts: dict[str, int] = {}
        for seed in range(seeds):
            texts, lengths = self.replies(seed, **params)
            tokens, total = tokens + sum(lengths), total + len(texts)
            for problem, text in zip(self.problems, texts):
                right += self.task.check(problem, text)
                for key, count in self.task.tally(problem, text).items():
                    counts[key] = counts.get(key, 0) + count
        low, high = wilson(right, total)
        metrics = {"tokens": round(tokens / total, 3), "accuracy": round(right / total, 4), "replies": total}
        metrics |= {"low": round(low, 4), "high": round(high, 4)}
        metrics |= {key.replace(" ", "_"): round(count / total, 4) for key, count in counts.items()}
        print(f"{name}: {metrics}", flush=True)
        return arm(name, config or {}, metrics)


def biased(asked: Asked, target: float) -> dict[int, float]:
    """The bias on the word that begins a check with which replies have ``target`` tokens on average."""
    ids = {asked.tokenizer.encode(text, add_special_tokens=False).ids[0] for text in (WORD, f"{WORD}, ")}
    low, high = -8.0, 0.0
    for _ in range(7):
        middle = (low + high) / 2
        mean = sum(asked.replies(100, logit_bias=dict.fromkeys(ids, middle))[1]) / len(asked.problems)
        low, high = (low, middle) if mean > target else (middle, high)
    return dict.fromkeys(ids, (low + high) / 2)


def study_checks(folder: Path, model: str, spec: str, name: str, options: argparse.Namespace) -> list[dict]:
    """All arms of one model. ``spec``: what its traces are sampled of."""
    own, given = folder / f"{name}-crest", {"device": options.device} if options.device else {}
    plan = crest.Plan(spec, options.traces, label=options.label)
    card = crest.calibrate(model, plan, own, **given)
    sets = controls(folder / f"{name}-sets", own)
    arms = []
    with LLM(model, hook=[f"s{i}={path}" for i, path in enumerate(sets.values())], **given) as llm:
        asked = Asked(llm, spec, options)
        arms.append(asked.measure(f"{name}: no hook", options.seeds, {"card": card}))
        for i, arm_name in enumerate(sets):
            arms.append(asked.measure(f"{name}: {arm_name}", options.seeds, hook=f"s{i}"))
        few = Asked(llm, spec, options, min(300, options.problems))
        bias = biased(few, arms[2]["metrics"]["tokens"])
        config = {"bias": round(next(iter(bias.values())), 3)}
        arms.append(asked.measure(f"{name}: bias on {WORD}", options.seeds, config, logit_bias=bias))
    for strength in (1, 2):
        folded = folder / f"{name}-folded-{strength}"
        converter = f"fold_crest:hooks={own},strength={strength}"
        convert(load_converter(converter), converter, checkpoint.resolve(model), folded)
        with LLM(str(folded), **given) as llm:
            arms.append(Asked(llm, spec, options).measure(f"{name}: folded c=-{strength}", options.seeds))
    return arms


def study_styles(folder: Path, options: argparse.Namespace) -> list[dict]:
    """Share of edits that hold and of answers that are kept, by target and margin; with directions of equal length
    at random, and with the prompt alone."""
    model, record = taught(folder, options.model, STYLE, "style", options)
    given, sets = {"device": options.device} if options.device else {}, {}
    for margin in ("runner_up", "sigmoid"):
        for target in STYLES:
            out = folder / f"{target}-{margin}"
            styles.calibrate(model, styles.Plan(target, options.traces // 3, margin=margin), out, **given)
            sets[f"{target}, {margin}"] = out
    one, generator = read_set("x", sets[f"{STYLES[1]}, runner_up"]), torch.Generator().manual_seed(1)

    def random_like(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(x.shape, generator=generator)
        return drawn / drawn.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)

    sets["random, runner_up"] = changed(one, folder / "random-style", weight=random_like)
    arms = []
    with LLM(model, hook=[f"s{i}={path}" for i, path in enumerate(sets.values())], **given) as llm:
        asked = Asked(llm, STYLE, options)
        for i, name in enumerate(["no hook", *sets]):
            chosen = {} if i == 0 else {"hook": f"s{i - 1}"}
            texts, _ = asked.replies(0, **chosen)
            metrics: dict[str, Any] = {}
            for kind, named in (("any", False), ("named", True)):
                mine = [(p, t) for p, t in zip(asked.problems, texts) if (asked.task.named(p) is not None) == named]
                told = [asked.task.style_of(text) for _, text in mine]
                metrics |= {f"{kind}_{s}": round(told.count(s) / max(1, len(mine)), 4) for s in STYLES}
                metrics[f"{kind}_kept"] = round(sum(asked.task.check(p, t) for p, t in mine) / max(1, len(mine)), 4)
            print(f"style: {name}: {metrics}", flush=True)
            arms.append(arm(f"style: {name}", {"train": record["plan"]}, metrics))
    return arms


@study("steering-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    problems: int = 1000,
    seeds: int = 3,
    traces: int = 1000,
    steps: Annotated[int, "training steps of the twin and of the styles"] = 400,
    rows: int = 16,
    label: Literal["follows", "ended"] = "follows",
    device: Literal["cuda", "cpu"] | None = None,
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
) -> None:
    options = report.options
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        if "model" in parts:
            report.arms += study_checks(folder, model, "reflect", model, options)
        if "twin" in parts:
            twin, record = taught(folder, model, TWIN, "twin", options)
            found = study_checks(folder, twin, TWIN, "twin", options)
            found[0]["config"]["train"] = record["plan"]
            report.arms += found
        if "style" in parts:
            report.arms += study_styles(folder, options)
