"""Measure what the quantised caches cost in answers: a lab model and its outlier twins, every codec, the same problems.

    python tools/kv_quality.py RESULT.json [--model base] [--device cpu] [-n 1000] [--seeds 7 8 9] [--seconds 480]
        [--tasks chain needle reflect story:... template] [--codecs fp8 ...] [--outliers 2 4 ...]

``story`` and ``template`` give perplexity, the other tasks exact match; needles are spread over lengths and depths. The
twins get the first task only, for the curve of a codec over the size of the outliers. Codecs are ordered by importance
(``bench.codec_quality``); when the seconds are over, the list ends there. The result is written after every arm, and
arms that the file had before are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from kvasir.bench.codec_quality import FIRST, OUTLIERS, REST, Study, answer, jobs, row_errors, verdicts  # noqa: E402
from kvasir.bench.result import arm, result, write_json  # noqa: E402
from kvasir.convert.checkpoint import convert  # noqa: E402
from kvasir.convert.converter import load_converter  # noqa: E402
from kvasir.lab.evaluation.evaluator import read_tokenizer  # noqa: E402
from kvasir.logs import setup  # noqa: E402
from kvasir.models import checkpoint  # noqa: E402

TASKS = ("chain", "needle", "reflect", "story:form=prose,length=512", "template")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=1000, help="problems of each task and seed")
    parser.add_argument("--seeds", nargs="*", type=int, default=(7, 8, 9))
    parser.add_argument("--tasks", nargs="*", default=TASKS)
    parser.add_argument("--codecs", nargs="*", help="only these; default: all")
    parser.add_argument("--outliers", nargs="*", type=int, default=OUTLIERS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    options = parser.parse_args()
    setup()
    folder = checkpoint.resolve(options.model)
    errors: list[dict] = []
    before = json.loads(options.output.read_text())["arms"] if options.output.exists() else []

    def save(arms: list[dict]) -> None:
        measured = {(a["name"], str(a["config"])) for a in arms + errors}
        arms = arms + errors + [a for a in before if (a["name"], str(a["config"])) not in measured]
        ratios, targets = verdicts(arms)
        found = result(f"kv-codecs-{options.model}", arms, ratios=ratios, targets=targets)
        write_json(options.output, found)

    with tempfile.TemporaryDirectory() as scratch:

        @cache
        def twin(size: int) -> Path:
            spec = f"outlier_twin:keys={size}"
            convert(load_converter(spec), spec, folder, Path(scratch) / str(size))
            return Path(scratch) / str(size)

        study = Study(folder, read_tokenizer(folder), twin, options.device, options.n, options.seconds)
        stories = [task for task in options.tasks if task.startswith("story")]
        prompts = [p for task in stories for _, exam in study.exams(task, options.seeds[0]) for p in exam.prompts][:8]
        if prompts:
            names = [c for c in (*FIRST[1:], *REST) if options.codecs is None or c in options.codecs]
            errors = [
                arm(f"error of {name}", {}, {f"relative_squared_error_{side}": value for side, value in sides.items()})
                for name, sides in row_errors(folder, options.device, prompts, names).items()
            ]
        answer(study, jobs(options.tasks, options.seeds, options.outliers, options.codecs), save)


if __name__ == "__main__":
    main()
