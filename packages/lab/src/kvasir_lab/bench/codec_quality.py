"""Quality of quantised caches: one model and its outlier twins answer the same problems with every codec.

Every pair of codec and model has an engine of its own. Problems, prompts and random numbers are those of the plain
cache, so every difference is paired. The most important arms come first; those that time does not reach are left out. A
twin computes the same function with outlier channels in its keys (``convert.converters.outlier_twin``), so the model
itself with a plain cache is the twins' baseline, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.bench.loaded import load_engine
from kvasir.bench.result import arm, judged
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir_lab.evaluation.evaluator import Answers, Exam, Losses, Outcome, Plan, prepare
from kvasir_lab.evaluation.evaluator import run as put
from kvasir_lab.evaluation.scores import compare, figures

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvasir.api.offline.llm import LLM

FIRST = ("plain", "int4_bdr", "int4", "fp8")
REST = (
    "int4_bdr:rotate_v=true",
    "int4_bdr:order=16",
    "int4_bdr:order=32",
    "int4_bdr:order=64",
    "nvfp4",
    "nvfp4:search=false",
    "int8",
    "int4_bdr:order=16,rotate_v=true",
    "int4_bdr:order=32,rotate_v=true",
    "int4_bdr:order=64,rotate_v=true",
)
TWINS = ("int4", "int4_bdr")
LATE_TWINS = ("nvfp4", "nvfp4:search=false", "fp8")
OUTLIERS = (8, 16, 4, 32, 2)
# Prompt tokens of the needle tasks, and places of the needle as a share of the prompt.
LENGTHS, DEPTHS = (512, 1024, 2048, 4064), (0, 0.5, 1)
# Most documents of held-out prose; more would repeat the same passages.
DOCUMENTS = 48
# Most problems of a task for a codec without a kernel, since it runs on the slow reference path.
SLOW = 250
# Share of the GPU's memory for an engine: remains of the last one must not keep the next from starting.
MEMORY = 0.4
# Figures that go into the result. Tables by difficulty would be too long for a hundred arms.
KEPT = (
    "exact",
    "interval",
    "problems",
    "perplexity",
    "perplexity_interval",
    "bits_per_byte",
    "documents",
    "scored_tokens",
    "tokens_per_reply",
)


@dataclass(frozen=True)
class Job:
    """One life of an engine.

    ``outliers`` is the size of the twin's outlier channels, 0 for the model itself. ``seeds`` are those of the
    problems.
    """

    codec: str
    outliers: int
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]


def task_specs(name: str, count: int) -> dict[str, int]:
    """Specs of lab tasks for a task of the table, with their problem counts. Needles are spread over lengths and
    depths."""
    if name == "needle":
        cells = [f"needle:min_length={length},length={length},depth={depth}" for length in LENGTHS for depth in DEPTHS]
        return dict.fromkeys(cells, -(-count // len(cells)))
    return {name: min(count, DOCUMENTS) if name.startswith("story") else count}


def jobs(
    tasks: Sequence[str], seeds: Sequence[int], outliers: Sequence[int], codecs: Sequence[str] | None = None
) -> list[Job]:
    """The jobs, the most important first.

    The order is: the model with the main codecs and all seeds, the curve over the twins, the model with other codecs,
    the twins with other codecs, and the remaining seeds of the other codecs. ``codecs`` keeps only these and ``plain``.
    """
    tasks, seeds = tuple(tasks), tuple(seeds)
    found = [Job(codec, 0, tasks, seeds) for codec in FIRST]
    found += [Job(codec, size, tasks[:1], seeds) for size in outliers for codec in TWINS]
    found += [Job(codec, 0, tasks, seeds[:1]) for codec in REST]
    found += [Job("plain", size, tasks[:1], seeds[:1]) for size in sorted(outliers)[-1:]]
    found += [Job(codec, size, tasks[:1], seeds[:1]) for codec in LATE_TWINS for size in outliers]
    found += [Job(codec, 0, tasks, seeds[1:]) for codec in REST if seeds[1:]]
    return [job for job in found if codecs is None or job.codec in (*codecs, "plain")]


@dataclass
class Study:
    """A study in progress.

    ``outcomes`` maps (codec, outliers) to task to seed to the outcomes of the task's parts. ``limit`` is the number of
    seconds for the whole study.
    """

    folder: Path
    tokenizer: Tokenizer
    twin: Callable[[int], Path]  # the folder of the twin with outliers of this size
    device: str
    count: int
    limit: float
    outcomes: dict[tuple[str, int], dict[str, dict[int, list[Outcome]]]] = field(default_factory=dict)
    _exams: dict[tuple[str, int], list[tuple[Plan, Exam]]] = field(default_factory=dict)
    # Seconds of the latest exam, by codec and task.
    _seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    # The number of outcomes and the metrics computed from them, by codec and outliers.
    _figures: dict[tuple[str, int], tuple[int, dict[str, Any]]] = field(default_factory=dict)
    _started: float = field(default_factory=lambda: time.monotonic())

    def left(self) -> float:
        return self.limit - (time.monotonic() - self._started)

    def exams(self, task: str, seed: int) -> list[tuple[Plan, Exam]]:
        """Problems of a task, drawn once, so that every codec gets the same.

        The list is empty, and the log says so, where a task has too few problems.
        """
        if (task, seed) not in self._exams:
            plans = [Plan((spec,), count=count, seed=seed) for spec, count in task_specs(task, self.count).items()]
            try:
                self._exams[task, seed] = [(plan, prepare(plan, self.tokenizer)[0]) for plan in plans]
            except ConfigError as e:
                log.error("%s is left out: %s", task, e)
                self._exams[task, seed] = []
        return self._exams[task, seed]

    def config(self, job: Job) -> EngineConfig:
        """The engine that a job runs on."""
        return EngineConfig.of(
            model=str(self.twin(job.outliers) if job.outliers else self.folder),
            device=self.device,
            kv_codec=job.codec,
            gpu_memory_utilization=MEMORY,
        )

    def run(self, job: Job, save: Callable[[list[dict[str, Any]]], None]) -> bool:
        """Give an engine as much of a job as time allows. Returns False where nothing was measured.

        ``save`` gets the arms after each task.
        """
        if not self._fits(job.codec, job.tasks[0]):
            return False
        config = self.config(job)
        found = self.outcomes.setdefault((job.codec, job.outliers), {})
        with engine(config) as llm:
            slow = self.device != "cpu" and not llm.engine.runner.pool.codec.fuses
            for seed in job.seeds:
                for task in job.tasks:
                    done = found.get(task, {})
                    if seed in done or (done and loss_only(task)) or not self._fits(job.codec, task):
                        continue  # there is little prose: other seeds would draw the same
                    began = time.monotonic()
                    if not (parts := self.exams(task, seed)):
                        continue
                    most = max(1, SLOW // len(parts)) if slow else self.count
                    found.setdefault(task, {})[seed] = [
                        put(llm, beginning(exam, most), plan, self.tokenizer) for plan, exam in parts
                    ]
                    self._seconds[job.codec, task] = time.monotonic() - began
                    save(self.arms())
        return bool(found)

    def _fits(self, codec: str, task: str) -> bool:
        return self.left() > self._seconds.get((codec, task), self._seconds.get(("plain", task), 0.0))

    def arms(self) -> list[dict[str, Any]]:
        """Results of what was measured so far. The figures of arms that have not changed are reused."""
        return [
            arm(codec, {"outliers": outliers} if outliers else {}, self.metrics(codec, outliers))
            for codec, outliers in self.outcomes
            if self.outcomes[codec, outliers]
        ]

    def metrics(self, codec: str, outliers: int) -> dict[str, Any]:
        """Metrics over all seeds by task, and by part for a task of several parts."""
        mine, plain = self.outcomes[codec, outliers], self.outcomes.get(("plain", 0), {})
        size = sum(len(seeds) for seeds in mine.values())
        if self._figures.get((codec, outliers), (0, {}))[0] == size:
            return self._figures[codec, outliers][1]
        found: dict[str, Any] = {}
        for task, by_seed in mine.items():
            specs = [outcome.exam.spec for outcome in next(iter(by_seed.values()))]
            pieces = {task: range(len(specs))} | ({spec: [i] for i, spec in enumerate(specs)} if len(specs) > 1 else {})
            for name, chosen in pieces.items():
                kept = {
                    k: v
                    for k, v in figures(pooled([by_seed[seed][i] for seed in by_seed for i in chosen])).items()
                    if k in KEPT
                }
                found[name] = kept | {"seeds": sorted(by_seed)}
                pairs = [
                    (plain[task][seed][i], by_seed[seed][i])
                    for seed in by_seed
                    if seed in plain.get(task, {})
                    for i in chosen
                ]
                if pairs and (codec, outliers) != ("plain", 0):
                    found[name]["against_plain"] = compare(
                        pooled([first(a, len(b.exam.prompts)) for a, b in pairs]), pooled([b for _, b in pairs])
                    )
        self._figures[codec, outliers] = size, found
        return found


def loss_only(task: str) -> bool:
    return task.split(":")[0] in ("story", "template")


@contextlib.contextmanager
def engine(config: EngineConfig) -> Iterator[LLM]:
    """An engine whose memory is free again afterwards."""
    with load_engine(config) as llm:
        yield llm


def beginning(exam: Exam, count: int) -> Exam:
    """The first ``count`` problems of an exam."""
    trained = None if exam.trained is None else exam.trained[:count]
    return dataclasses.replace(exam, problems=exam.problems[:count], prompts=exam.prompts[:count], trained=trained)


def first(outcome: Outcome, count: int) -> Outcome:
    """The outcome of an exam's first ``count`` problems."""
    exam = beginning(outcome.exam, count)
    if isinstance(outcome, Losses):
        known = None if outcome.known_bits is None else outcome.known_bits[:count]
        return dataclasses.replace(
            outcome,
            exam=exam,
            nats=outcome.nats[:count],
            tokens=outcome.tokens[:count],
            bytes=outcome.bytes[:count],
            known_bits=known,
        )
    return dataclasses.replace(
        outcome,
        exam=exam,
        right=outcome.right[:count],
        tokens=outcome.tokens[:count],
        votes=outcome.votes[:count],
        texts=outcome.texts[:count],
    )


def pooled(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of one task, with several seeds or difficulties, into one."""
    head = outcomes[0]
    if len(outcomes) == 1:
        return head
    trained = None if head.exam.trained is None else [t for o in outcomes for t in o.exam.trained or []]
    problems, prompts = ([x for o in outcomes for x in getattr(o.exam, name)] for name in ("problems", "prompts"))
    exam = dataclasses.replace(head.exam, problems=problems, prompts=prompts, trained=trained)
    seconds = sum(o.seconds for o in outcomes)
    if isinstance(head, Losses):
        known = None if head.known_bits is None else np.concatenate([o.known_bits for o in outcomes])
        return Losses(
            exam,
            *(np.concatenate([getattr(o, name) for o in outcomes]) for name in ("nats", "tokens", "bytes")),
            seconds,
            known,
        )
    return Answers(
        exam,
        np.concatenate([o.right for o in outcomes]),
        np.concatenate([o.tokens for o in outcomes]),
        [v for o in outcomes for v in o.votes],
        sum(o.num_cut for o in outcomes),
        seconds,
        [t for o in outcomes for t in o.texts],
    )


def row_errors(
    folder: Path, device: str, prompts: Sequence[list[int]], codecs: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Squared error of the keys and of the values that ``prompts`` leave in the cache, relative to their squares, by
    codec."""
    import torch

    from kvasir import technique
    from kvasir.kv.codec import CODECS, Codec
    from kvasir.kv.pool import KVPool
    from kvasir.types import SamplingParams

    longest = max(map(len, prompts)) + 1
    config = EngineConfig.of(
        model=str(folder),
        device=device,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=len(prompts),
        num_pages=len(prompts) * (longest // 16 + 2),
        gpu_memory_utilization=MEMORY,
    )
    with engine(config) as llm:
        llm.generate(
            [{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        )
        pool = llm.engine.runner.pool
        rows = {}
        for group, pages in zip(pool.groups, pool.num_pages):
            for layer in group.layers:
                cache = pool.layer(layer)
                k_GND, v_GND = pool.codec.read(cache, torch.arange(1, pages, device=cache.planes["k"].device))
                written = (k_GND != 0).any(-1).all(0)
                rows[layer] = [x[:, written].transpose(0, 1).contiguous() for x in (k_GND, v_GND)]
        found = {}
        for name in codecs:
            codec = technique.load(CODECS, name, Codec)
            sums = np.zeros((2, 2))
            for group in pool.groups:
                for layer in group.layers:
                    k_TGD, v_TGD = rows[layer]
                    slots = torch.arange(codec.page_slots, codec.page_slots + len(k_TGD), device=k_TGD.device)
                    pages = -(-len(k_TGD) // codec.page_slots)
                    row = group.rows[group.layers.index(layer)]
                    one = dataclasses.replace(group, layers=(layer,), rows=(row,))
                    cache = KVPool([one], codec, [1 + pages], codec.page_slots, k_TGD.device, k_TGD.dtype).layer(layer)
                    codec.write(cache, k_TGD, v_TGD, slots)
                    for side, (kept, x_TGD) in enumerate(
                        zip(codec.read(cache, torch.arange(1, 1 + pages, device=k_TGD.device)), (k_TGD, v_TGD))
                    ):
                        error = kept[:, : len(x_TGD)].transpose(0, 1).double() - x_TGD.double()
                        sums[side] += [float(error.square().sum()), float(x_TGD.double().square().sum())]
            found[name] = {"keys": float(sums[0, 0] / sums[0, 1]), "values": float(sums[1, 0] / sums[1, 1])}
    return found


def answer(study: Study, todo: Sequence[Job], save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Run all jobs in order while time allows. ``save`` gets the arms after each task of a job.

    A codec that cannot run here loses only its own arms.
    """
    for job in todo:
        where = f"{job.codec}{f', outliers {job.outliers}' if job.outliers else ''}"
        began = time.monotonic()
        try:
            if not study.run(job, save):
                log.warning("no time left for %s", where)
                continue
        except ConfigError as e:
            log.error("%s: %s", where, e)
            continue
        log.info(
            "%s: %s (%.0f s, %.0f s left)",
            where,
            ", ".join(
                f"{t} {m.get('exact', m.get('perplexity')):.4g}"
                for t, m in study.metrics(job.codec, job.outliers).items()
                if t in job.tasks
            ),
            time.monotonic() - began,
            study.left(),
        )


def verdicts(arms: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Ratios and targets of a result.

    ``int4_bdr`` is compared with ``plain`` on the model itself, and on the mildest twin that costs ``int4`` 20 points
    or more. ``nvfp4`` is compared with itself without ScaleSearch, by the error on the model's own keys and values.
    """
    by_name = {(a["name"], a["config"].get("outliers", 0)): a["metrics"] for a in arms}
    plain, main = by_name.get(("plain", 0), {}), by_name.get(("int4_bdr", 0), {})
    ratios: dict[str, float] = {}
    targets: dict[str, Any] = {}

    def judge(name: str, top: float, bottom: float, **bound: float) -> None:
        metric, pair = name.rsplit(" ", 1)
        if bottom:
            ratios[name] = round(float(top / bottom), 4)
            targets.update(judged({metric: bound}, {name: ratios[name]}, pair))

    for task in [t for t in plain if t in main and ":min_length" not in t]:
        kind, bound = ("exact", {"at_least": 0.99}) if "exact" in plain[task] else ("perplexity", {"at_most": 1.01})
        judge(f"{task}.{kind} int4_bdr/plain", main[task][kind], plain[task][kind], **bound)
    for size in sorted(s for name, s in by_name if name == "int4" and s):
        for task, metrics in by_name["int4", size].items():
            twin = by_name.get(("int4_bdr", size), {})
            if task in plain and task in twin and "exact" in metrics and plain[task]["exact"] - metrics["exact"] >= 0.2:
                judge(
                    f"{task}.exact int4_bdr:outliers={size}/plain",
                    twin[task]["exact"],
                    plain[task]["exact"],
                    at_least=0.97,
                )
                break
        else:
            continue
        break
    searched, largest = (by_name.get((f"error of nvfp4{rest}", 0), {}) for rest in ("", ":search=false"))
    for metric in searched:
        judge(f"{metric} nvfp4/nvfp4:search=false", searched[metric], largest.get(metric, 0.0), at_most=0.82)
    return ratios, targets
