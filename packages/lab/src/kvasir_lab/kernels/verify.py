"""Time whole verify steps in three ways: shared reads in a graph, row by row in a graph, and launched kernel by kernel.

The llama-8b shape with random weights over random keys, bf16, chains and trees, greedy draws included. Milliseconds
from the launch to the tokens on the host, medians of rounds in which the ways take turns. ``gap``: the largest
difference of hidden states to the step launched kernel by kernel, relative to their size; more than rounding fails, and
so does a way that does not run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

from kvasir.attention.backend import AttentionBackend, Site
from kvasir.bench.workloads import SHAPES
from kvasir.decoding.sampler import Sampler
from kvasir.engine.start.build import ways_to_run
from kvasir.engine.ways.capture import CudaCapture, call_through
from kvasir.engine.ways.graph_buckets import ROW_BY_ROW
from kvasir.engine.ways.runner import Runner
from kvasir.engine.ways.step_way import StepParts
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.families import build_spec
from kvasir.models.loader import fill_random
from kvasir.technique import load
from kvasir.types import Plan, Request, SamplingParams, Sequence, Span, Status
from kvasir_lab.kernels.frame import Report
from tests.engine.test_draft_graphs import FromTheDevice

STEPS = [(1, 8), (4, 8), (16, 5), (64, 3)]  # (sequences, rows of each)
CONTEXTS = (1024, 32768)
# Tokens whose keys fit beside the weights of an 8B model, in bf16 on a GPU of 141 GB.
MOST_TOKENS = 600_000
ROUNDS, WARM = 9, 2
CAPTURED = 4  # a bucket is captured after a few uses
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
}


class Steps:
    """A model, a runner and sequences in the middle of decoding, whose keys are noise."""

    def __init__(self, model: Decoder, codec_name: str, device: torch.device, count: int, context: int) -> None:
        codec = load("kvasir.kv.codecs", codec_name, Codec)
        spec, dtype, size = model.spec, model.place.dtype, codec.page_slots
        pages = -(-(context + 64) // size)
        groups = spec.cache_groups()
        pool = KVPool(groups, codec, [1 + count * pages] * len(groups), size, device, dtype)
        for cache in (pool.layer(i) for i in range(len(spec.layers))):
            for name, plane in cache.planes.items():
                if plane.dtype.is_floating_point and plane.dtype.itemsize > 1:
                    plane.uniform_(0.01, 0.02) if name.endswith("_meta") else plane.normal_()
                else:
                    plane.view(torch.uint8).random_(0, 120)
        backend = load("kvasir.attention.backends", "triton" if device.type == "cuda" else "torch", AttentionBackend)
        backend.prepare(
            Site(device.type, dtype, codec.kernel, size, tuple({layer.mixer.attention() for layer in spec.layers}))
        )
        if device.type == "cpu":
            backend = FromTheDevice(backend)
        sampler = Sampler(spec.vocab_size, spec.vocab_size, count, device, ())
        parts = StepParts(model, pool, backend, sampler, device, max_model_len=context + 64)
        capture = CudaCapture(device) if device.type == "cuda" else call_through
        self.runner = Runner(parts, ways_to_run(parts, capture, 8))
        self.seqs = []
        for i in range(count):
            prompt = [(7 * i + j) % spec.vocab_size for j in range(context + 1)]
            seq = Sequence(
                Request(id=str(i), prompt_ids=prompt, params=SamplingParams(temperature=0.0), seed=i, max_tokens=1)
            )
            seq.tables, seq.seat, seq.status = (
                [list(range(1 + i * pages, 1 + (i + 1) * pages)) for _ in groups],
                i,
                Status.RUNNING,
            )
            self.runner.open(seq)
            self.seqs.append(seq)

    def spans(self, rows: int, tree: bool) -> list[Span]:
        """Spans of ``rows`` rows behind the keys of every sequence: a chain, or a binary tree."""
        found = []
        for seq in self.seqs:
            start = len(seq.tokens) - 1
            seq.draft = [(start + j) % 200 for j in range(rows - 1)]
            found.append(
                Span(
                    seq,
                    start,
                    rows,
                    want={"sample": range(rows)},
                    commit="walk",
                    seat=seq.seat,
                    parents=[(i - 1) // 2 if i else -1 for i in range(rows)] if tree else None,
                )
            )
        return found

    def ways(self, rows: int, tree: bool) -> dict[str, int | None]:
        """Ways to launch a step: the form of its graph, or None for kernel by kernel."""
        forms = {"one by one": None} | (
            {} if tree or rows * len(self.seqs) > self.runner.graphs.buckets[-1] else {"graph, row by row": ROW_BY_ROW}
        )
        shared = next((form for form in self.runner.graphs.choice.forms if form >= rows), None)
        return forms | ({} if shared is None else {"graph, shared": shared})

    def launch(self, spans: list[Span], form: int | None) -> None:
        """Launch a step and wait for its tokens on the host."""
        runner, graphs = self.runner, self.runner.graphs
        graphs.takes, graphs.choice.form = lambda spans: form is not None, lambda spans: form
        runner.launch(Plan(0, spans)).read()

    def hidden(self, spans: list[Span], form: int) -> torch.Tensor:
        graphs = self.runner.graphs
        graphs.choice.form = lambda spans: form
        return graphs.forward(spans).clone()


@torch.inference_mode()
def eager_hidden(steps: Steps, spans: list[Span]) -> torch.Tensor:
    runner = steps.runner
    batch = runner.parts.packer.pack(spans)
    runner.backend.plan(batch)
    return runner.model.forward(batch, runner.parts.caches, runner.backend)


def time_case(report: Report, steps: Steps, codec: str, rows: int, context: int, tree: bool) -> None:
    spans, ways = steps.spans(rows, tree), steps.ways(rows, tree)
    want = eager_hidden(steps, spans).float()
    gaps = {
        name: float((steps.hidden(spans, form).float() - want).abs().max() / want.abs().max()) if form else 0.0
        for name, form in ways.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    steps.runner.seats.forget()
    for turn in range(ROUNDS + WARM + CAPTURED):
        for name, form in ways.items():
            if steps.runner.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            steps.launch(spans, form)
            if turn >= WARM + CAPTURED:
                spent[name].append(time.perf_counter() - began)
    for name, times in spent.items():
        metrics = {
            "ms": round(1e3 * statistics.median(times), 3),
            "ms_least": round(1e3 * min(times), 3),
            "gap": round(gaps[name], 5),
            "failed": int(not gaps[name] < 5e-2),
        }
        report.add(
            f"{len(steps.seqs)} x {rows} rows at {context // 1024}k",
            {
                "codec": codec,
                "sequences": len(steps.seqs),
                "rows": rows,
                "context": context,
                "shape": "tree" if tree else "chain",
                "way": name,
            },
            metrics,
        )


def time_steps(report: Report, model: Decoder, codec: str, context: int) -> None:
    device = model.place.device
    for count, rows in STEPS:
        if count * context > MOST_TOKENS:
            continue
        steps = Steps(model, codec, device, count, context)
        for tree in (False, True):
            try:
                time_case(report, steps, codec, rows, context, tree)
            except Exception as e:  # the others are still worth their figures
                print("does not run:", type(e).__name__, str(e)[:300], flush=True)
                config = {"codec": codec, "shape": "tree" if tree else "chain"}
                report.add(f"{count} x {rows} rows at {context // 1024}k", config, {"failed": 1})
        del steps
        gc.collect()  # graphs and what they hold refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report.save()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", action="append", help="default: plain and int4_bdr")
    parser.add_argument("--small", action="store_true", help="a model of two layers on the CPU, to try the experiment")


def run(options: argparse.Namespace) -> int:
    report, small = Report("gpu_verify", options.output), options.small
    contexts = (40, 70) if small else CONTEXTS
    place = Placement(torch.device("cpu" if small else "cuda"), torch.float32 if small else torch.bfloat16)
    model = Decoder(build_spec(SHAPES["llama-8b"] | (SMALL if small else {})), place, max(contexts) + 64)
    fill_random(model, 0)
    for codec in options.codec or ["plain", "int4_bdr"]:
        for context in contexts:
            time_steps(report, model, codec, context)
    return report.end()
