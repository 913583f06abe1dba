"""Measure what token rounding costs in answers: a model with experts, every direction, the same problems as without.

    python -m kvasir_lab.studies rounding_quality RESULT.json --model FOLDER [--device cuda] [-n 1000] [--rows 2048]
        [--seeds 7]
        [--seconds 480] [--tasks story:... chain path countdown] [--directions nearest up down]

`kvasir lab train experts --out FOLDER` trains a model for it. ``story`` gives perplexity, the other tasks exact match,
and every difference is paired. Only prompts are rounded, in steps that hold a tile of rows an expert on average; all
arms take their prompts in steps of up to ``--rows`` rows, and the fewer these are, the more of them change. Arms that
the file has are kept.
"""

from __future__ import annotations

import math
from typing import Annotated

from kvasir.config import EngineConfig
from kvasir.kernels.moe_rounding import DIRECTIONS
from kvasir.models import checkpoint
from kvasir_lab.bench.codec_quality import Job, Study
from kvasir_lab.evaluation.evaluator import read_tokenizer
from kvasir_lab.paired_quality import PLAIN, measure, no_twin, room
from kvasir_lab.study import Report, study

TASKS = ("story:form=prose,length=512", "chain", "path", "countdown")


class Roundings(Study):
    """Directions of token rounding in the place of codecs. ``rows``: of a step, at most."""

    rows = 2048

    def config(self, job: Job) -> EngineConfig:
        return EngineConfig.of(
            model=str(self.folder),
            device=self.device,
            token_rounding="off" if job.codec == PLAIN else job.codec,
            max_num_batched_tokens=self.rows,
            **room(self.device),
        )


@study("token-rounding-experts")
def main(
    report: Report,
    *,
    model: str = "lab-experts",
    device: str = "cpu",
    n: Annotated[int, "-n", "problems of each task and seed"] = 1000,
    seeds: tuple[int, ...] = (7,),
    tasks: tuple[str, ...] = TASKS,
    seconds: Annotated[float, "when to stop"] = math.inf,
    rows: Annotated[int, "most rows of a step"] = Roundings.rows,
    directions: Annotated[tuple[str, ...], DIRECTIONS] = DIRECTIONS,
) -> None:
    folder = checkpoint.resolve(model)
    study = Roundings(folder, read_tokenizer(folder), no_twin, device, n, seconds)
    study.rows = rows
    measure(study, directions, report, {"rows": rows})
