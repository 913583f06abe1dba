"""What the quantised caches cost in answers: a lab model and its outlier twins, with every codec, on the same problems.

    python tools/kv_quality.py RESULT.json [--model base] [--device cpu] [-n 1000] [--seed 7] [--tasks chain,needle:length=640,reflect,story]
                                          [--codecs fp8 ...] [--outliers 2 4 ...]

``story`` gives perplexity, the others exact match. A twin computes the same function with outlier channels in its keys
(``convert.converters.outlier_twin``): the curve of ``int4`` and ``int4_bdr`` over the outliers' size, on the first task and
``story``. The result is written after every arm; arms that the file had before are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from kvasir.api.llm import LLM  # noqa: E402
from kvasir.bench.result import arm, result  # noqa: E402
from kvasir.cli.eval import split_tasks  # noqa: E402
from kvasir.config import EngineConfig  # noqa: E402
from kvasir.convert.checkpoint import convert  # noqa: E402
from kvasir.convert.converter import load_converter  # noqa: E402
from kvasir.lab.evaluator import Exam, Plan, prepare, read_tokenizer  # noqa: E402
from kvasir.lab.evaluator import run as put  # noqa: E402
from kvasir.lab.scores import compare, figures  # noqa: E402
from kvasir.models import checkpoint  # noqa: E402

CODECS = ("int4", "int4_bdr", "int4_bdr:order=64", "int4_bdr:order=32", "int4_bdr:order=16", "int4_bdr:rotate_v=true", "fp8", "int8", "nvfp4",
          "nvfp4:search=false")
OUTLIERS = (2, 4, 8, 16, 32)
# Of the figures, what goes into the result: the per-difficulty tables of a hundred arms would be a book.
KEPT = ("exact", "interval", "problems", "perplexity", "bits_per_byte", "documents", "tokens_per_reply")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--codecs", nargs="*", default=CODECS)
    parser.add_argument("--outliers", nargs="*", type=int, default=OUTLIERS)
    parser.add_argument("--tasks", default="chain,needle:length=640,reflect,story")
    options = parser.parse_args()
    folder = checkpoint.resolve(options.model)
    tokenizer = read_tokenizer(folder)
    plan = Plan(split_tasks(options.tasks), count=options.n, seed=options.seed)
    exams = prepare(plan, tokenizer)
    arms = json.loads(options.output.read_text())["arms"] if options.output.exists() else []

    def answer(model: str, codec: str, chosen: list[Exam], plain: list | None, **config: int) -> list:
        started = time.monotonic()
        with LLM(config=EngineConfig.of(model=model, device=options.device, kv_codec=codec)) as llm:
            outcomes = [put(llm, exam, plan, tokenizer) for exam in chosen]
        metrics = {}
        for i, outcome in enumerate(outcomes):
            metrics[outcome.exam.spec] = {k: v for k, v in figures(outcome, plan.seed).items() if k in KEPT}
            if plain is not None:
                metrics[outcome.exam.spec]["against_plain"] = compare(plain[i], outcome, plan.seed)
        arms[:] = [a for a in arms if (a["name"], a["config"]) != (codec, config)] + [arm(codec, config, metrics)]
        print(config, codec, {t: m.get("exact", m.get("perplexity")) for t, m in metrics.items()}, f"{time.monotonic() - started:.0f} s", flush=True)
        options.output.write_text(json.dumps(result(f"kv-codecs-{options.model}", arms), indent=1) + "\n")
        return outcomes

    plain = answer(options.model, "plain", exams, None)
    for codec in options.codecs:
        answer(options.model, codec, exams, plain)
    few = [0, *([len(exams) - 1] if len(exams) > 1 else [])]
    with tempfile.TemporaryDirectory() as scratch:
        for size in options.outliers:
            spec = f"outlier_twin:keys={size}"
            convert(load_converter(spec), spec, folder, Path(scratch) / spec)
            for codec in ("int4", "int4_bdr"):
                answer(str(Path(scratch) / spec), codec, [exams[i] for i in few], [plain[i] for i in few], outliers=size)


if __name__ == "__main__":
    main()
