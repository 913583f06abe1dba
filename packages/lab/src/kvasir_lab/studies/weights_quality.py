"""Measure what quantised weights cost in answers: one model, every format, the same problems as with plain weights.

    python -m kvasir_lab.studies weights_quality RESULT.json [--model base] [--device cpu] [-n 1000] [--seeds 7]
        [--seconds 480]
        [--tasks story:... chain path needle] [--formats f8 u4:group=32,scale=search ...]

``story`` gives perplexity, the other tasks exact match; needles are spread over lengths and depths. Every difference is
paired with the plain model. When the seconds are over, the list of formats ends there; the result is written after
every arm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from kvasir.config import EngineConfig
from kvasir.models import checkpoint
from kvasir_lab.bench.codec_quality import MEMORY, Job, Study, answer
from kvasir_lab.evaluation.evaluator import read_tokenizer
from kvasir_lab.study import Report, study

TASKS = ("story:form=prose,length=512", "chain", "path", "needle")
# The most important first.
FORMATS = (
    "f8",
    "u4",
    "u4:scale=search",
    "nvfp4",
    "nvfp4:scale=search",
    "mxfp4",
    "mxfp4:scale=search",
    "i8",
    "f8:scale=block",
    "u4:group=32",
    "u4:group=32,scale=search",
    "u4:zeros=true",
    "u4:zeros=true,scale=search",
    "i8:scale=search",
)


class Weights(Study):
    """Formats of weights in the place of codecs."""

    def config(self, job: Job) -> EngineConfig:
        return EngineConfig.of(
            model=str(self.folder), device=self.device, weights=job.codec, gpu_memory_utilization=MEMORY
        )


def no_twin(size: int) -> Path:
    raise AssertionError(f"no job asks for outliers of {size}")


@study("weights-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    device: str = "cpu",
    n: Annotated[int, "-n", "problems of each task and seed"] = 1000,
    seeds: tuple[int, ...] = (7,),
    tasks: tuple[str, ...] = TASKS,
    formats: tuple[str, ...] = FORMATS,
    seconds: Annotated[float, "when to stop"] = math.inf,
) -> None:
    folder = checkpoint.resolve(model)
    study = Weights(folder, read_tokenizer(folder), no_twin, device, n, seconds)
    answer(study, [Job(spec, 0, tuple(tasks), tuple(seeds)) for spec in ("plain", *formats)], report.replace)
