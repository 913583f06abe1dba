"""Measure what the quantised caches cost in answers: a lab model and its outlier twins, every codec, the same problems.

    python -m kvasir_lab.studies kv_quality RESULT.json [--model base] [--device cpu] [-n 1000] [--seeds 7 8 9]
        [--seconds 480]
        [--tasks chain needle reflect story:... template] [--codecs fp8 ...] [--outliers 2 4 ...]

``story`` and ``template`` give perplexity, the other tasks exact match; needles are spread over lengths and depths. The
twins get the first task only, for the curve of a codec over the size of the outliers. Codecs are ordered by importance
(``bench.codec_quality``); when the seconds are over, the list ends there. The result is written after every arm, and
arms that the file had before are kept.
"""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated

from kvasir.bench.result import arm
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.models import checkpoint
from kvasir_lab.bench.codec_quality import FIRST, OUTLIERS, REST, Study, answer, jobs, row_errors, verdicts
from kvasir_lab.evaluation.evaluator import read_tokenizer
from kvasir_lab.study import Report, study

TASKS = ("chain", "needle", "reflect", "story:form=prose,length=512", "template")


@study("kv-codecs-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    device: str = "cpu",
    n: Annotated[int, "-n", "problems of each task and seed"] = 1000,
    seeds: tuple[int, ...] = (7, 8, 9),
    tasks: tuple[str, ...] = TASKS,
    codecs: Annotated[tuple[str, ...] | None, "only these; default: all"] = None,
    outliers: tuple[int, ...] = OUTLIERS,
    seconds: Annotated[float, "when to stop"] = math.inf,
) -> None:
    folder, errors, before = checkpoint.resolve(model), [], report.before

    def save(arms: list[dict]) -> None:
        measured = {(a["name"], str(a["config"])) for a in arms + errors}
        arms = arms + errors + [a for a in before if (a["name"], str(a["config"])) not in measured]
        ratios, targets = verdicts(arms)
        report.more = {"ratios": ratios} | ({"targets": targets} if targets else {})
        report.replace(arms)

    with tempfile.TemporaryDirectory() as scratch:

        @cache
        def twin(size: int) -> Path:
            spec = f"outlier_twin:keys={size}"
            convert(load_converter(spec), spec, folder, Path(scratch) / str(size))
            return Path(scratch) / str(size)

        study = Study(folder, read_tokenizer(folder), twin, device, n, seconds)
        stories = [task for task in tasks if task.startswith("story")]
        prompts = [p for task in stories for _, exam in study.exams(task, seeds[0]) for p in exam.prompts][:8]
        if prompts:
            names = [c for c in (*FIRST[1:], *REST) if codecs is None or c in codecs]
            errors += [
                arm(f"error of {name}", {}, {f"relative_squared_error_{side}": value for side, value in sides.items()})
                for name, sides in row_errors(folder, device, prompts, names).items()
            ]
        answer(study, jobs(tasks, seeds, outliers, codecs), save)
