"""Measure what token rounding costs in answers: a model with experts, every direction, the same problems as without.

    python -m tools.rounding_quality RESULT.json --model FOLDER [--device cuda] [-n 1000] [--rows 2048] [--seeds 7]
        [--seconds 480] [--tasks story:... chain path countdown] [--directions nearest up down]

`kvasir lab train experts --out FOLDER` trains a model for it. ``story`` gives perplexity, the other tasks exact match,
and every difference is paired. Only prompts are rounded, in steps that hold a tile of rows an expert on average; all
arms take their prompts in steps of up to ``--rows`` rows, and the fewer these are, the more of them change. Arms that
the file has are kept.
"""

from __future__ import annotations

import argparse

from kvasir.bench.codec_quality import Job, Study
from kvasir.config import EngineConfig
from kvasir.kernels.moe_rounding import DIRECTIONS
from kvasir.lab.evaluation.evaluator import read_tokenizer
from kvasir.logs import setup
from kvasir.models import checkpoint
from tools.paired_quality import PLAIN, arguments, measure, no_twin, room

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments(parser, "lab-experts", TASKS, 1000)
    parser.add_argument("--rows", type=int, default=Roundings.rows, help="most rows of a step")
    parser.add_argument("--directions", nargs="*", choices=DIRECTIONS, default=DIRECTIONS)
    options = parser.parse_args()
    setup()
    folder = checkpoint.resolve(options.model)
    study = Roundings(folder, read_tokenizer(folder), no_twin, options.device, options.n, options.seconds)
    study.rows = options.rows
    measure(study, options.directions, options, "token-rounding-experts", {"rows": options.rows})


if __name__ == "__main__":
    main()
