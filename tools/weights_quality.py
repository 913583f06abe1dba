"""Measure what quantised weights cost in answers: one model, every format, the same problems as with plain weights.

    python -m tools.weights_quality RESULT.json [--model base] [--device cpu] [-n 1000] [--seeds 7] [--seconds 480]
        [--tasks story:... chain path needle] [--formats f8 u4:group=32,scale=search ...]

``story`` gives perplexity, the other tasks exact match; needles are spread over lengths and depths. Every difference is
paired with the plain model. When the seconds are over, the list of formats ends there; the result is written after
every arm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir.bench.codec_quality import MEMORY, Job, Study, answer
from kvasir.bench.result import result, write_json
from kvasir.config import EngineConfig
from kvasir.lab.evaluation.evaluator import read_tokenizer
from kvasir.logs import setup
from kvasir.models import checkpoint

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=1000, help="problems of each task and seed")
    parser.add_argument("--seeds", nargs="*", type=int, default=(7,))
    parser.add_argument("--tasks", nargs="*", default=TASKS)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    options = parser.parse_args()
    setup()
    folder = checkpoint.resolve(options.model)

    def save(arms: list[dict]) -> None:
        write_json(options.output, result(f"weights-{Path(options.model).name}", arms))

    study = Weights(folder, read_tokenizer(folder), no_twin, options.device, options.n, options.seconds)
    given = tuple(options.tasks), tuple(options.seeds)
    answer(study, [Job(spec, 0, *given) for spec in ("plain", *options.formats)], save)


if __name__ == "__main__":
    main()
