"""Measure what latent attention and low-rank caches cost in answers, by rank, method and mode.

    python -m kvasir_lab.studies mla_study OUT.json [--model base] [--device cuda]
        [--parts losses control twelve answers healed]
        [--texts 128] [--held-out 16] [-n 1000] [--minutes 1 3 6] [--seconds 3000]

``losses``: held-out perplexity and KL of every one-shot conversion, of `kvasir convert mla` (mode A) and of the codec
`lowrank` (mode B, ranks of equal cache). ``control``: the same sums over unconverted layers; ``twelve``: in a model of
12 layers, trained for it. ``answers``: perplexity and exact answers through the engine, for every one-shot
conversion, and ``healed`` for mode A after each of ``--minutes``. The result is written after every arm, and arms that
the file had before are kept, so that a run that was cut goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from kvasir import LLM
from kvasir.bench.result import arm, result, write_json
from kvasir.convert.calibrate import Layers, Run, Texts
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import Source, load_converter
from kvasir.models import checkpoint
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.calibration import default_texts
from kvasir_lab.evaluation.evaluator import Plan as Exams
from kvasir_lab.evaluation.evaluator import prepare, read_tokenizer
from kvasir_lab.evaluation.evaluator import run as put
from kvasir_lab.evaluation.scores import figures
from kvasir_lab.healing.data import default_corpus
from kvasir_lab.healing.heal import Plan, heal
from kvasir_lab.model import Model, Shape
from kvasir_lab.study import Report, study

# Metric and division of ranks by name. Mode A's `output` is TransMLA's joint latent, mode B's is CARE's uniform one.
METHODS = {
    "svd": "metric=weights",
    "output": "metric=output",
    "care_paper": "metric=output,alloc=care_paper",
    "care_code": "metric=output,alloc=care_code",
    "relative": "metric=output,alloc=relative",
    "score": "metric=score",
}
TASKS = ("story:form=prose,length=512", "template", "chain", "path", "needle")
TWELVE = Shape(dim=128, layers=12, ffn=320, heads=4, kv_heads=2, head_dim=32)


def ranks_of(mixer: Any, rope: int) -> list[int]:
    """Ranks of mode A: parity, and an eighth to a half of the source's cache: 448, 256, 128 and 64 for 512 elements."""
    full = 2 * mixer.num_kv_heads * mixer.head_dim
    return [full - rope, full // 2, full // 4, full // 8]


def arms_of(source: Source, rope: int, fold: str) -> Iterator[tuple[str, str, int]]:
    """Name, converter and cached elements of every one-shot conversion. Mode B has ranks of mode A's cache."""
    mixer = source.spec.layers[0].mixer
    for rank in ranks_of(mixer, rope):
        full = 2 * mixer.num_kv_heads * mixer.head_dim - rope
        for method, options in METHODS.items():
            if rank == full and method != "output":
                continue  # nothing is lost by the rank
            yield f"A {rank} {method}", f"mla:rank={rank},rope_dim={rope},fold={fold},{options}", rank + rope
            half = (rank + rope) // 2
            yield f"B {half} {method}", f"lowrank:rank={half},{options}", 2 * half


class Unconverted(Run):
    """A calibration whose sums are those of the source's layers, whatever was converted before: the control."""

    def layers(self, texts: Any = None) -> Layers:
        found = super().layers(texts)
        if texts is None:
            source, sums = super().layers(), []
            for index in range(len(source.specs)):
                sums.append(source.sums(index, ("kv", "q")))
                source.advance(index)
            found.sums = lambda index, sites: sums[index]  # type: ignore[method-assign]
        return found


def layer_errors(run: Run, sides: dict[int, Any]) -> list[float]:
    """Share of every layer's keys and values that latents lose, in the model that has them."""
    from kvasir.kv.latents import LatentLayer, Maps

    layers, found = run.layers(run.texts.calibration), []
    place = layers.decoder.place
    for index, pair in sides.items():
        gram, size = layers.sums(index, ("kv",)).kv, pair[0].down.shape[0]
        for side, part in zip(pair, (gram[:size, :size], gram[size:, size:])):
            lost = torch.eye(size, dtype=part.dtype, device=part.device) - side.down @ side.up.T
            found.append(float((lost.T @ part @ lost).trace() / part.trace()))
        codec = LatentLayer(*(s.down.shape[1] for s in pair))
        parts = {"k_down": pair[0].down.T, "k_up": pair[0].up, "v_down": pair[1].down.T, "v_up": pair[1].up}
        heads = layers.specs[index].mixer.num_kv_heads
        table = layers.table(index)
        codec.fill(
            Maps.of({k: v.float() for k, v in parts.items()}, heads, place.device, place.dtype), table.table, False
        )
        layers.codecs[index] = codec
        layers.advance(index)
    return found


def one_shot(source: Source, run: Run, spec: str) -> Any:
    """Calibrate one conversion in memory. Returns the converter, whose record holds the losses."""
    converter = load_converter(spec)
    converter.check(source)
    converter.calibrate(source, run)
    return converter


def train_twelve(folder: Path, device: str, steps: int) -> Path:
    """A model of 12 layers, trained for ``steps`` on the books and problems."""
    corpus = default_corpus(checkpoint.resolve("nano"), 0, problems=300)
    model = Model(TWELVE, 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        ids = corpus.batch(8, 0, step, 128).to(device)
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"  12 layers, step {step}: loss {float(loss.detach()):.3f}", flush=True)
    export.export(model.cpu(), lab_tokenizer.load(checkpoint.resolve("nano")), folder, torch.float32)
    return folder


class Study:
    """Arms that are measured once each, and the file that they are kept in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.monotonic()
        self.arms = json.loads(options.output.read_text())["arms"] if options.output.exists() else []

    def measure(self, name: str, config: dict[str, Any], get: Callable[[], dict[str, Any]]) -> None:
        """Measure an arm that is not there yet, while there is time."""
        known = any(a["name"] == name for a in self.arms)
        if known or not re.search(self.options.only, name) or time.monotonic() - self.start > self.options.seconds:
            return
        self.arms.append(arm(name, config, get()))
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.options.output, result(f"mla-{self.options.model}", self.arms))
        print(f"{time.monotonic() - self.start:6.0f} s  {name}: {self.arms[-1]['metrics']}", flush=True)

    def opened(self, folder: Path, kind: type[Run] = Run) -> tuple[Source, Run]:
        """A model with as many texts as were asked for."""
        config = checkpoint.read_config(folder)

        def texts(path: Path) -> Texts:
            found = default_texts(path)
            return replace(
                found,
                calibration=found.calibration[: self.options.texts],
                held_out=found.held_out[: self.options.held_out],
            )

        return Source.of(folder, config), kind.open(folder, config, "", texts, self.options.device)

    def losses(self, folder: Path, rope: int, fold: str) -> None:
        """Held-out losses of every one-shot conversion."""
        source, run = self.opened(folder)
        for name, spec, cached in arms_of(source, rope, fold):
            self.measure(
                f"losses {name}",
                {"converter": spec, "cached": cached, "texts": len(run.texts.calibration)},
                lambda spec=spec: self._losses(one_shot(source, run, spec)),
            )

    def _losses(self, converter: Any) -> dict[str, Any]:
        return {**converter.record["held_out"], "ranks": [r for r in converter.record["ranks"] if r is not None]}

    def control(self, name: str, folder: Path, rope: int, fold: str) -> None:
        """The loss with sums over converted and over unconverted layers, and what each layer then loses."""
        (source, run), (_, other) = self.opened(folder), self.opened(folder, Unconverted)
        mixer = source.spec.layers[0].mixer
        for rank in ranks_of(mixer, rope)[1:]:
            half = (rank + rope) // 2
            for mode, spec in (
                ("A", f"mla:rank={rank},rope_dim={rope},fold={fold}"),
                ("B", f"lowrank:rank={half}"),
            ):
                for prefix, over in (("converted", run), ("unconverted", other)):

                    def get(over: Run = over, spec: str = spec, mode: str = mode) -> dict[str, Any]:
                        made = one_shot(source, over, spec)
                        found = dict(made.record["held_out"])
                        if mode == "B":
                            errors = layer_errors(run, made.sides)
                            found |= {"layer_error": sum(errors) / len(errors), "layer_errors": errors}
                        return found

                    self.measure(f"control {name} {mode} {rank if mode == 'A' else half} {prefix}", {"converter": spec},
                                 get)  # fmt: skip

    def answers(self, folder: Path, rope: int, fold: str, scratch: Path) -> None:
        """Perplexity and exact answers of the source and of every one-shot conversion."""
        self.measure("answers source", {}, lambda: self._answers(folder))
        self.measure("answers int8", {"kv_codec": "int8"}, lambda: self._answers(folder, kv_codec="int8"))
        source = Source.of(folder, checkpoint.read_config(folder))
        for name, spec, cached in arms_of(source, rope, fold):
            self.measure(
                f"answers {name}",
                {"converter": spec, "cached": cached},
                lambda name=name, spec=spec: self._converted(folder, spec, scratch / name.replace(" ", "-")),
            )

    def healed(self, folder: Path, rope: int, fold: str, scratch: Path) -> None:
        """The same for mode A after each of the training times, in ranks of equal tokens a method."""
        source = Source.of(folder, checkpoint.read_config(folder))
        for minutes in self.options.minutes:
            for name, spec, cached in arms_of(source, rope, fold):
                if name[0] != "A":
                    continue
                self.measure(
                    f"healed {minutes:g} {name}",
                    {"converter": spec, "cached": cached, "minutes": minutes},
                    lambda spec=spec, minutes=minutes, name=name: self._healed(
                        folder, spec, minutes, scratch / name.replace(" ", "-")
                    ),
                )

    def _make(self, folder: Path, spec: str, target: Path) -> Path:
        if not target.exists():
            convert(load_converter(spec), spec, folder, target, texts=default_texts, device=self.options.device)
        return target

    def _converted(self, folder: Path, spec: str, target: Path) -> dict[str, Any]:
        made = self._make(folder, spec, target)
        return self._answers(folder, kv_codec=f"lowrank:folder={made}") if spec[0] == "l" else self._answers(made)

    def _healed(self, folder: Path, spec: str, minutes: float, target: Path) -> dict[str, Any]:
        made, done = self._make(folder, spec, target), target.with_name(f"{target.name}-{minutes:g}")
        corpus = lambda: default_corpus(folder, 42)  # noqa: E731
        record = heal(made, done, folder, Plan(minutes=minutes), corpus, device=self.options.device)
        assert record is not None, "not interrupted"
        return {"tokens": record["tokens"], "steps": record["steps"], "held_out": record["held_out"][-1],
                **self._answers(done)}  # fmt: skip

    def _answers(self, folder: Path, **options: Any) -> dict[str, Any]:
        tokenizer = read_tokenizer(folder if (folder / "tokenizer.json").exists() else checkpoint.resolve("base"))
        # Prose repeats its passages beyond 48 documents.
        plans = [Exams((task,), count=min(48, self.options.n) if task.startswith("story") else self.options.n)
                 for task in TASKS]  # fmt: skip
        found: dict[str, Any] = {}
        with LLM(str(folder), device=self.options.device, gpu_memory_utilization=0.12, **options) as llm:
            for plan in plans:
                for exam in prepare(plan, tokenizer):
                    scores = figures(put(llm, exam, plan, tokenizer))
                    for key in ("exact", "interval", "perplexity", "perplexity_interval", "problems"):
                        if key in scores:
                            found[f"{exam.spec.split(':')[0]} {key}"] = scores[key]
        return found


@study("mla-{model}", needs_file=True)
def main(
    report: Report,
    *,
    model: str = "base",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    parts: tuple[str, ...] = ("losses", "control", "twelve", "answers", "healed"),
    rope: int = 64,
    fold: Annotated[str, "as of `kvasir convert mla`; auto costs a conversion for each"] = "auto",
    texts: int = 128,
    held_out: int = 16,
    n: Annotated[int, "-n", "problems of each task"] = 1000,
    minutes: tuple[float, ...] = (1, 3, 6),
    twelve_steps: int = 1000,
    only: Annotated[str, "regular expression of the arms to measure"] = "",
    seconds: Annotated[float, "when no further arm begins"] = float("inf"),
) -> None:
    options = report.options
    study, folder = Study(options), checkpoint.resolve(options.model)
    with tempfile.TemporaryDirectory() as home:
        scratch = Path(home)
        if "losses" in options.parts:
            study.losses(folder, options.rope, options.fold)
        if "control" in options.parts:
            study.control(options.model, folder, options.rope, options.fold)
        if "twelve" in options.parts:
            twelve = train_twelve(scratch / "twelve", options.device, options.twelve_steps)
            study.control("12 layers", twelve, TWELVE.head_dim // 2, options.fold)
        if "answers" in options.parts:
            study.answers(folder, options.rope, options.fold, scratch)
        if "healed" in options.parts:
            study.healed(folder, options.rope, options.fold, scratch)
