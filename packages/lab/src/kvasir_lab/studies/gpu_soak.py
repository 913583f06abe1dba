"""Soak `kvasir serve` with minutes of mixed load: it must keep its size, finish every request and answer the same.

    python -m kvasir_lab.studies gpu_soak RESULT.json [MODEL | --shape llama-8b] [--seconds 540] [--clients 96]
        [-- OPTION...]

The load: streams and plain answers, n = 3, log-probabilities, penalties, grammars, stop strings, shared prefixes,
prompts of up to three quarters of the context, requests that must be refused, clients that leave in the middle, and
bursts. There are pages for a fraction of what the requests ask for, so sequences queue and are preempted. OPTIONs go to
the server and take precedence over those chosen here (--num-pages, --max-num-seqs, --max-model-len).

Memory, files and threads are sampled throughout. Exit status 1, with the reasons, when something grew, was left over,
failed or was answered differently; the result says so, too. The run takes --seconds, the start, and half a minute. It
runs on a CPU as well, with the packaged model unless another is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from kvasir.bench.result import arm, finish, result
from kvasir.bench.servers import serving
from kvasir.bench.workloads import shape_folder
from tests.integration.load import ALLOWED, Soaked, quarters, soak

# Pools small enough to run out of: pages of 16 tokens for a few of the longest sequences.
LARGE = ["--max-model-len", "8192", "--max-num-seqs", "64", "--num-pages", "2048"]
# Difference of log-probabilities in bf16 that counts as a tie: a captured step has padded rows, so its products round
# differently.
TIE = 0.125
SMALL = ["--max-model-len", "1024", "--max-num-seqs", "16", "--num-pages", "160"]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--shape")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument(
        "--clients", type=int, help="that ask again and again, and in each burst; default 96, without a shape 24"
    )
    parser.add_argument(
        "--commit",
        default=os.environ.get("KVASIR_COMMIT"),
        help="what is measured, where there is no repository to ask",
    )
    given = sys.argv[1:] if given is None else given
    at = given.index("--") if "--" in given else len(given)
    args, options = parser.parse_args(given[:at]), given[at + 1 :]
    flags, clients = [*(LARGE if args.shape else SMALL), *options], args.clients or (96 if args.shape else 24)
    with contextlib.ExitStack() as stack:
        model = args.model
        if args.shape:
            model = stack.enter_context(shape_folder(args.shape, tokenizer=True))
            joined_words(Path(model) / "tokenizer.json")
            flags += ["--load-format", "dummy", "--served-model-name", args.shape]
        server = stack.enter_context(serving("kvasir", model, flags))
        start = server.wait()
        found = soak(
            server.url,
            server.process.pid,
            seconds=args.seconds,
            clients=clients,
            tie=TIE if args.shape and "--batch-invariant" not in options and torch.cuda.is_available() else 0.0,
        )
        if server.process.poll() is not None:
            found.reasons.append(f"the server ended with code {server.process.returncode}")
    config = {"flags": flags, "clients": clients, "allowed": ALLOWED, "gpu_of": found.gpu_of} | (
        {"shape": args.shape} if args.shape else {}
    )
    finish(
        result(
            f"soak-{args.shape or args.model or 'embedded'}",
            [arm("kvasir", config, {"start_s": start, **measured(found)})],
        ),
        args.output,
        args.commit,
    )
    for reason in found.reasons:
        print(reason, file=sys.stderr)
    return bool(found.reasons)


def joined_words(file: Path) -> None:
    """Grammars need to know how a shape's words make a text: one after the other, byte by byte."""
    tokenizer = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            tokenizer
            | {"decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}}
        )
    )


def measured(found: Soaked) -> dict[str, Any]:
    """Memory in MiB, by quarters of the time."""
    levels = {
        name: {**{f"q{i + 1}": round(q, 1) for i, q in enumerate(quarters(values))}, "most": round(max(values), 1)}
        for name, values in found.series.items()
        if name not in ("pages_free", "running", "waiting")
    }
    ends = {how: sum(c[how] for c in found.counts.values()) for how in ("ok", "left", "refused", "invalid", "failed")}
    return {
        "failed_checks": len(found.reasons),
        "reasons": found.reasons,
        "seconds": round(found.seconds, 1),
        "output_tok_s": round(found.totals["generation_tokens"] / found.seconds, 1),
        "prompt_tok_s": round(found.totals["prompt_tokens"] / found.seconds, 1),
        "requests": ends,
        **{f"requests.{kind}": dict(sorted(counts.items())) for kind, counts in found.counts.items()},
        **{name: int(value) for name, value in found.totals.items()},
        **levels,
        "pages_free_least": min(found.series["pages_free"]),
        "running_most": max(found.series["running"]),
        "waiting_most": max(found.series["waiting"]),
    }
