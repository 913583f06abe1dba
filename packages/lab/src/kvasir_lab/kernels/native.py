"""Time the engine on a CPU in turns: with its C kernels, without them, and in bf16, which they do not serve.

The workloads: a load whose steps are mixed (96 requests, 32 at once: 200 prompt tokens, 100 of output, each prompt read
beside the others' decodes), prompts alone, and decoding at 1, 16 and 64. A workload that the machine's other work
drowns in noise is named at the end (exit status 1), and the rest is written.

``--kv-codec``: decoding alone, over prompts that are computed once and then cached, of 256, 2,000 and 4,000 tokens, 1
and 16 at once: the kernels with the plain cache, with this codec, and this codec without them. The last is left out
where a step would take seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from kvasir.bench.offline import TooNoisy, decoding, described, measure, own_engine, timed
from kvasir.bench.result import arm, finish, ratios_of, result, spread
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.config import EngineConfig
from kvasir.engine.start import build
from kvasir.logs import log

WORKLOADS = ("mixed:96:200:100", "prompts:8:512:2", "decode1:1:64:128", "decode16:16:64:128", "decode64:64:64:64")
SMALL = ("mixed:5:20:6", "prompts:2:40:2")
CONTEXTS = (
    "decode1:1:256:64",
    "decode1-2k:1:2000:64",
    "decode1-4k:1:4000:64",
    "decode16:16:256:64",
    "decode16-2k:16:2000:32",
    "decode16-4k:16:4000:32",
)
SMALL_CONTEXTS = ("decode1:1:50:4", "decode2:2:90:4")
TORCH_TOKENS = 8000  # tokens of all sequences that the torch arm reads, at most: its steps take seconds beyond that
ARMS = {"native": {}, "plain": {}, "bf16": {"dtype": "bfloat16"}}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="base", help="a model, or a shape with random weights, e.g. qwen3-0.6b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", action="append", help="NAME:BATCH:PROMPT:OUTPUT, instead of the usual ones")
    parser.add_argument("--arms", help="some of the arms, with commas")
    parser.add_argument("--kv-codec")
    parser.add_argument("--small", action="store_true", help="a dry run of tiny workloads")


def run(options: argparse.Namespace) -> int:
    usually = (
        (SMALL_CONTEXTS if options.small else CONTEXTS) if options.kv_codec else SMALL if options.small else WORKLOADS
    )
    batches = [Batch.parse(w) for w in options.workload or usually]
    shape = options.model if options.model in SHAPES else None
    usual = EngineConfig.of(
        device="cpu",
        max_num_seqs=max(32, *(b.batch for b in batches if b.name != "mixed"), 0),
        max_model_len=2048,
        enable_prefix_caching=False,
        **({"num_threads": options.threads} if options.threads else {}),
    )
    noisy: list[str] = []
    with contextlib.ExitStack() as stack:
        if shape:
            usual = usual.replace(
                model=stack.enter_context(shape_folder(shape)), load_format="dummy", skip_tokenizer_init=True
            )
        else:
            usual = usual.replace(model=options.model)
        if options.kv_codec:
            cached(
                usual.replace(max_model_len=None, enable_prefix_caching=True, cpu_cache_bytes=1536 << 20),
                batches,
                shape,
                options,
                noisy,
            )
        else:
            plain(usual, batches, shape, options, noisy)
    if noisy:
        print(f"too noisy, so measured in part or not at all: {', '.join(noisy)}", file=sys.stderr)
    return int(bool(noisy))


@contextlib.contextmanager
def unless_noisy(batch: Batch, noisy: list[str]) -> Iterator[None]:
    """Note a workload that is too noisy and go on: the others took an hour to measure."""
    try:
        yield
    except TooNoisy as e:
        log.error("%s", e)
        noisy.append(batch.name)


def plain(
    usual: EngineConfig, batches: list[Batch], shape: str | None, options: argparse.Namespace, noisy: list[str]
) -> None:
    found = {}
    for mixed in (True, False):  # the load runs 32 at once, the rest as many as it says
        some = [b for b in batches if (b.name == "mixed") == mixed]
        with contextlib.ExitStack() as inner:
            config = usual.replace(max_num_seqs=32) if mixed else usual
            arms, vocab = {}, 0
            for name in (options.arms or ",".join(ARMS)).split(",") if some else ():
                generate, llm = own(config.replace(**ARMS[name]), name == "native", inner)
                arms[name], vocab = timed(generate), llm.info.tokenizer_size
            for batch in some:
                with unless_noisy(batch, noisy):
                    for name, metrics in measure(arms, [batch], vocab, options.repeats).items():
                        found.setdefault(name, {}).update(metrics)
    entries = [arm(name, described(usual.replace(**ARMS[name]), shape), metrics) for name, metrics in found.items()]
    finish(
        result(
            "cpu-native",
            entries,
            ratios=ratios_of(entries, [("native", other) for other in found if other != "native"]),
        ),
        options.output,
    )


def cached(
    config: EngineConfig, batches: list[Batch], shape: str | None, options: argparse.Namespace, noisy: list[str]
) -> None:
    """Decoding with a quantised cache; arms take turns in every round."""
    codec = options.kv_codec
    settings = {"native-plain": {}, f"native-{codec}": {"kv_codec": codec}, f"torch-{codec}": {"kv_codec": codec}}
    wanted = options.arms.split(",") if options.arms else list(settings)
    with contextlib.ExitStack() as stack:
        arms, vocab, found = {}, 0, {name: {} for name in wanted}
        for name in wanted:
            generate, llm = own(config.replace(**settings[name]), name.startswith("native"), stack)
            assert (llm.engine.runner.native is not None) == name.startswith("native"), (
                f"{name}: not the path that it is named after"
            )
            arms[name], vocab = timed(generate), llm.info.tokenizer_size
        for batch in batches:
            taking_part = [n for n in wanted if n.startswith("native") or batch.batch * batch.prompt <= TORCH_TOKENS]
            with unless_noisy(batch, noisy):
                for _ in range(options.repeats):
                    for name in taking_part:
                        for metric, values in decoding(arms[name], batch, vocab, 1, 0).items():
                            found[name].setdefault(metric, []).extend(values)
    entries = [
        arm(
            name,
            described(config.replace(**settings[name]), shape),
            {metric: spread(values) for metric, values in metrics.items()},
        )
        for name, metrics in found.items()
    ]
    pairs = [
        (f"native-{codec}", other)
        for other in ("native-plain", f"torch-{codec}")
        if {other, f"native-{codec}"} <= set(wanted)
    ]
    finish(result(f"cpu-native-{codec.split(':')[0]}", entries, ratios=ratios_of(entries, pairs)), options.output)


def own(config: EngineConfig, native: bool, stack: contextlib.ExitStack):
    """An engine with the C kernels or without, closed by ``stack``."""
    known = build.why_not
    if not native:
        build.why_not = lambda *_: "left out"
    try:
        return own_engine(config, stack)
    finally:
        build.why_not = known
