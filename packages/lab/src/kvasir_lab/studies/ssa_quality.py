"""Measure what ScaleSearchAttention costs in answers: the emulation of kvasir_lab/ssa_attention.py, part by part.

    python -m kvasir_lab.studies ssa_quality RESULT.json [--model base] [--device cuda] [-n 300] [--seeds 7]
        [--seconds 280]
        [--tasks story:... chain path needle] [--arms whole nvfp4 ...]

``story`` gives perplexity, the other tasks exact match; needles are spread over lengths and depths. Every difference is
paired with the same reference attention in the model's own numbers. ``-n 100`` fits five minutes of a GPU, and a run
that is cut off or started again keeps the arms that the file has. No speed is measured.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from kvasir.config import EngineConfig
from kvasir.models import checkpoint
from kvasir_lab import ssa_attention
from kvasir_lab.bench.codec_quality import Job, Study
from kvasir_lab.evaluation.evaluator import read_tokenizer
from kvasir_lab.paired_quality import PLAIN, measure, no_twin, room
from kvasir_lab.study import Report, study

TASKS = ("story:form=prose,length=512", "chain", "path", "needle")
BACKEND = Path(ssa_attention.__file__)
# The arms of kvasir_lab/studies/ssa_study.py, the most important first; whole is the method with all its parts.
ARMS = {
    "whole": "search=true,rotate=true,split=true,sinks=16,recent=128",
    "nvfp4": "search=false,rotate=false,split=false,sinks=0,recent=0",
    "search": "search=true,rotate=false,split=false,sinks=0,recent=0",
    "search-rotation-split": "search=true,rotate=true,split=true,sinks=0,recent=0",
    "whole-without-search": "search=false,rotate=true,split=true,sinks=16,recent=128",
    "search-rotation": "search=true,rotate=true,split=false,sinks=0,recent=0",
}


class Attentions(Study):
    """Arms of attention in the place of codecs."""

    def config(self, job: Job) -> EngineConfig:
        backend = "torch" if job.codec == PLAIN else f"{BACKEND}:{ARMS[job.codec]}"
        return EngineConfig.of(
            model=str(self.folder), device=self.device, attention_backend=backend, **room(self.device)
        )


@study("ssa-quality-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    device: str = "cpu",
    n: Annotated[int, "-n", "problems of each task and seed"] = 300,
    seeds: tuple[int, ...] = (7,),
    tasks: tuple[str, ...] = TASKS,
    seconds: Annotated[float, "when to stop"] = math.inf,
    arms: Annotated[tuple[str, ...], ARMS] = tuple(ARMS),
) -> None:
    folder = checkpoint.resolve(model)
    study = Attentions(folder, read_tokenizer(folder), no_twin, device, n, seconds)
    measure(study, arms, report, {"model": model})
