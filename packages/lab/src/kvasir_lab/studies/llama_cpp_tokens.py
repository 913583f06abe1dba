"""Compare greedy answers of llama.cpp and ours on the same weights (as GGUF): how many of 16 agree, and up to where.

    python -m kvasir_lab.studies llama_cpp_tokens OUT.json
        needs llama-cpp-python and gguf, e.g. in a folder on PYTHONPATH

Where llama.cpp computes in fp32, answers should differ at ties only; the other file types round. ``gaps``: at the token
where two answers part, the lead of the likeliest token's log-probability over the next, by our engine.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from kvasir.api.offline.llm import LLM
from kvasir.bench import gguf
from kvasir.bench.peers.llama_cpp import LlamaCpp
from kvasir.models import checkpoint
from kvasir.types import SamplingParams
from kvasir_lab.study import Arms, Report, study

ROWS, PROMPT, OUTPUT = 16, 64, 128
FILES = {
    "f32, f32 cache": ("f32", "f32", True),
    "f32": ("f32", "f16", True),
    "bf16": ("bf16", "f16", True),
    "q8_0": ("q8_0", "f16", False),
}


def shared(one: list[int], other: list[int]) -> int:
    """Number of equal tokens at the start of two answers."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))


def lead(step: dict[int, Any]) -> float:
    first, second = sorted((found.logprob for found in step.values()), reverse=True)[:2]
    return first - second


@study("llama-cpp-tokens")
def main(report: Report) -> Arms:
    for name in ("base", "nano"):
        prompts = [
            [random.Random(f"{name} {row} {at}").randrange(32, 2016) for at in range(PROMPT)] for row in range(ROWS)
        ]
        with LLM(model=name, device="cpu", num_threads=1) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False, logprobs=2)
            outs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
            ours, leads = [list(o.token_ids) for o in outs], [[lead(step) for step in o.logprobs] for o in outs]
        for label, (file_type, kv_type, extra) in FILES.items():
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "model.gguf"
                gguf.write(checkpoint.resolve(name), file, file_type)
                engine = LlamaCpp(
                    file, num_threads=1, max_num_seqs=ROWS, max_model_len=256, kv_type=kv_type, extra_buffers=extra
                )
                theirs = engine.generate(prompts, OUTPUT)
            same = [shared(one, other) for one, other in zip(theirs, ours)]
            config = {"model": name, "peer": "llama_cpp", "file_type": file_type, "kv_type": kv_type}
            metrics = {
                "answers": ROWS,
                "equal_answers": sum(s == OUTPUT for s in same),
                "tokens_alike": same,
                "gaps": [round(leads[row][at], 6) for row, at in enumerate(same) if at < OUTPUT],
            }
            yield f"{name} {label}", config, metrics
