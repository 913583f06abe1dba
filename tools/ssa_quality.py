"""Measure what ScaleSearchAttention costs in answers: the emulation of tools/ssa_attention.py, part by part.

    python -m tools.ssa_quality RESULT.json [--model base] [--device cuda] [-n 300] [--seeds 7] [--seconds 280]
        [--tasks story:... chain path needle] [--arms whole nvfp4 ...]

``story`` gives perplexity, the other tasks exact match; needles are spread over lengths and depths. Every difference is
paired with the same reference attention in the model's own numbers. ``-n 100`` fits five minutes of a GPU, and a run
that is cut off or started again keeps the arms that the file has. No speed is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir.bench.codec_quality import Job, Study
from kvasir.config import EngineConfig
from kvasir.lab.evaluation.evaluator import read_tokenizer
from kvasir.logs import setup
from kvasir.models import checkpoint
from tools.paired_quality import PLAIN, arguments, measure, no_twin, room

TASKS = ("story:form=prose,length=512", "chain", "path", "needle")
BACKEND = Path(__file__).parent / "ssa_attention.py"
# The arms of tools/ssa_study.py, the most important first; whole is the method with all its parts.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments(parser, "base", TASKS, 300)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=tuple(ARMS))
    options = parser.parse_args()
    setup()
    folder = checkpoint.resolve(options.model)
    study = Attentions(folder, read_tokenizer(folder), no_twin, options.device, options.n, options.seconds)
    measure(study, options.arms, options, f"ssa-quality-{options.model}", {"model": options.model})


if __name__ == "__main__":
    main()
