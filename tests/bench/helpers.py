"""Shared by the tests of the benchmark: the stand-in for vLLM, and a shape small enough for a CPU."""

import json
from pathlib import Path

from kvasir.bench.workloads import SHAPES

SITE = str(Path(__file__).parent / "site")
SMALL = SHAPES["qwen3-0.6b"] | dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=2048,
    max_position_embeddings=256,
)


def log_of(file):
    """The calls that the stand-in recorded, in order."""
    return [json.loads(line) for line in Path(file).read_text().splitlines()]
