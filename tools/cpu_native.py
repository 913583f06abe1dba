"""What the C kernels give on a CPU: the engine with them, without them, and in bf16 (which they do not serve), taking turns in one process.

    python tools/cpu_native.py OUT.json [--model base] [--threads 2] [--repeats 3] [--small]

Workloads: a load whose steps are mixed (96 requests, 32 at once: 200 prompt tokens, 100 of output, each prompt read beside the
others' decodes), prompts alone, and decoding at 1, 16 and 64. ``--model qwen3-0.6b``: that shape, with random weights. ``--small``: a
dry run, to see that all of it runs. The result has the schema of ``kvasir bench``.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from kvasir.bench.offline import described, measure, own_engine, timed
from kvasir.bench.result import arm, finish, ratios_of, result
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.config import EngineConfig
from kvasir.engine import runner

WORKLOADS = ("mixed:96:200:100", "prompts:8:512:2", "decode1:1:64:128", "decode16:16:64:128", "decode64:64:64:64")
SMALL = ("mixed:5:20:6", "prompts:2:40:2")
ARMS = {"native": {}, "plain": {}, "bf16": {"dtype": "bfloat16"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", action="append", help="NAME:BATCH:PROMPT:OUTPUT, instead of those above")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    batches = [Batch.parse(w) for w in options.workload or (SMALL if options.small else WORKLOADS)]
    shape = options.model if options.model in SHAPES else None
    usual = EngineConfig.of(device="cpu", max_num_seqs=max(32, *(b.batch for b in batches if b.name != "mixed"), 0), max_model_len=2048,
                            enable_prefix_caching=False, **({"num_threads": options.threads} if options.threads else {}))
    with contextlib.ExitStack() as stack:
        if shape:
            usual = usual.replace(model=stack.enter_context(shape_folder(shape)), load_format="dummy", skip_tokenizer_init=True)
        else:
            usual = usual.replace(model=options.model)
        found = {}
        for mixed in (True, False):  # the load runs 32 at once, the rest as many as it says
            some = [b for b in batches if (b.name == "mixed") == mixed]
            with contextlib.ExitStack() as inner:
                config = usual.replace(max_num_seqs=32) if mixed else usual
                arms, vocab = {}, 0
                for name in options.arms.split(",") if some else ():
                    generate, llm = own(config.replace(**ARMS[name]), name == "native", inner)
                    arms[name], vocab = timed(generate), llm.info.tokenizer_size
                for name, metrics in (measure(arms, some, vocab, options.repeats) if some else {}).items():
                    found.setdefault(name, {}).update(metrics)
        entries = [arm(name, described(usual.replace(**ARMS[name]), shape), metrics) for name, metrics in found.items()]
        finish(result("cpu-native", entries, ratios=ratios_of(entries, [("native", other) for other in found if other != "native"])), options.out)


def own(config: EngineConfig, native: bool, stack: contextlib.ExitStack):
    """An engine, with the C kernels or without."""
    known = runner.why_not
    if not native:
        runner.why_not = lambda *_: "left out"
    try:
        return own_engine(config, stack)
    finally:
        runner.why_not = known


if __name__ == "__main__":
    main()
