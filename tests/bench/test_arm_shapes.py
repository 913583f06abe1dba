"""Arms with a shape of their own: read from a case, named in the result, and judged against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.bench import case as cases
from kvasir.bench.compare import _limits
from kvasir.bench.workloads import SHAPES
from kvasir.errors import ConfigError

CASES = Path(__file__).parents[2] / "bench" / "cases"
WORK = {"decode8": {"batch": 8, "prompt": 64, "output": 8, "measure": ["decode"]}}


def test_a_latent_arm_has_its_own_limit():
    case = cases.read(CASES / "mla-llama-8b-long.toml")
    assert case.shapes == {"mla": "llama-8b-mla", "mla_int8": "llama-8b-mla"} and case.shape == "llama-8b"
    assert all("shape" not in settings for settings in case.arms.values())
    configs = {arm: SHAPES[shape] for arm, shape in case.shapes.items()}
    rates = {"copy_bytes_s": 4e12, "matmul_flop_s": 7e14, "dtype_bytes": 2.0}
    limits = _limits(case, SHAPES["llama-8b"], configs, list(case.workloads), rates)
    key = "long16x32k.decode_tok_s"
    assert limits[f"{key} mla_int8"] > limits[f"{key} mla"] > 1.5 * limits[key]


def test_shapes_that_cannot_be_compared_are_refused():
    for extra in ({"on_disk": True}, {"peer": {"name": "vllm"}}):
        table = {"shape": "llama-8b", "arms": {"a": {"shape": "llama-8b-mla"}}, "workloads": WORK}
        with pytest.raises(ConfigError, match="arms have shapes of their own only"):
            cases.parse("x", table | extra)
