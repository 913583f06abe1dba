"""Check the kernels of hooks on a GPU, and measure what hooks cost a decode step of the 8B shape.

    python -m kvasir_lab.studies hooks OUT.json [--shape llama-8b --check]

Engines with and without hooks, at BATCHES sequences: hooks loaded and not named; a set whose gates never open; one
whose gates are open on every row, in all layers, with a probe. A step's time is that of TOKENS more tokens. Runs of all
kinds take turns within an engine, and engines are built twice in turns.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch

from kvasir import LLM, SamplingParams
from kvasir.bench.result import spread
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.hooks.hook import Gate, Hook, write_set
from kvasir.kernels import steer
from kvasir_lab.study import Arms, Report, study
from tests.kernels.check_steer import check_gates, check_row_bits, check_steer

BATCHES = (1, 64)
TOKENS, PROMPT = 128, 128
ROUNDS = 4
SETTINGS = {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 64, "skip_tokenizer_init": True}
NEVER = Gate(window=(1 << 20, (1 << 20) + 1))


def check() -> None:
    """Hold the kernels to their references on this machine, at the shapes of an 8B model, too."""
    large = [
        steer.Case((1, 0, 2, 1) * 16, (steer.DOT | steer.NORM | steer.SOFT, steer.ADD), 32, 128, 2),
        steer.Case((1, 2) * 16, (steer.SHIFT, steer.SHIFT), 1, 4096, 3, adds=True),
    ]
    for case in [*steer.grid(), *large]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_steer(case, dtype, "cuda")
            check_row_bits(case, dtype, "cuda")
    check_gates("cuda")
    print("the kernels agree with their references", flush=True)


def sets(folder: Path, shape: str) -> dict[str, Path]:
    """One set that is open on every row and one that never is, with random directions and probes."""
    config, generator = SHAPES[shape], torch.Generator().manual_seed(0)
    layers, heads = tuple(range(config["num_hidden_layers"])), config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    tensors = {}
    for layer in layers:
        tensors[f"hook.{layer}.direction"] = torch.randn(heads, width, generator=generator)
        tensors[f"hook.{layer}.probe"] = torch.randn(heads, width, generator=generator)
        tensors[f"hook.{layer}.bias"] = torch.zeros(heads)
    op = "rotate:c=-1,gate=soft"
    return {
        name: write_set(folder / name, [Hook("head_out", layers, op, gate)], tensors)
        for name, gate in (("open", Gate()), ("closed", NEVER))
    }


def time_engine(model: str, hooks: dict[str, Path], found: dict[tuple[int, str], list[float]], key: str) -> None:
    """Add step times in seconds by batch and kind."""
    kinds = ["not named", *hooks] if hooks else ["not loaded"]
    given = [f"{name}={path}" for name, path in hooks.items()]
    with LLM(model, hook=given, **SETTINGS) as llm:
        for batch in BATCHES:
            prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 1000 for j in range(PROMPT)]} for i in range(batch)]

            def run(kind: str, count: int, prompts: list = prompts) -> float:
                named = kind if kind in hooks else None
                params = SamplingParams(
                    temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, hook=named
                )
                torch.cuda.synchronize()
                began = time.perf_counter()
                llm.generate(prompts, params)
                return time.perf_counter() - began

            for kind in kinds:
                for _ in range(2):
                    run(kind, TOKENS)
            for _ in range(ROUNDS):
                for kind in kinds:
                    short = run(kind, 2)
                    found.setdefault((batch, kind), []).append((run(kind, TOKENS + 2) - short) / TOKENS)
    print(key, {f"{b} {k}": round(min(v) * 1e3, 4) for (b, k), v in found.items()}, flush=True)


@study("hooks-{shape}")
def main(
    report: Report,
    *,
    shape: Annotated[str, SHAPES] = "llama-8b",
    checked: Annotated[bool, "--check", "hold the kernels to their references first"] = False,
) -> Arms:
    if checked:
        check()
    found: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as home, shape_folder(shape) as model:
        hooks = sets(Path(home), shape)
        for key, used in (("without", {}), ("with", hooks)) * 2:
            time_engine(model, used, found, key)
    for (batch, kind), seconds in found.items():
        plain = min(found[batch, "not loaded"])
        metrics = {"step_ms": spread([s * 1e3 for s in seconds]), "of_not_loaded": round(min(seconds) / plain, 4)}
        yield f"{kind} at {batch}", {"batch": batch, "shape": shape}, metrics
