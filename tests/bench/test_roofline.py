"""Limits of the machine, compared with figures worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from kvasir.bench import compare, roofline
from kvasir.bench.case import parse
from kvasir.bench.result import limit_of
from kvasir.bench.workloads import SHAPES, Batch
from kvasir.engine.drafts.drafting import _roofline as drafting_roofline
from kvasir.engine.start.build import _roofline
from kvasir.models import cost
from kvasir.models.families import build_spec

RATES = {"copy_bytes_s": 4.1e12, "matmul_flop_s": 795e12, "dtype_bytes": 2}


def test_llama_8b_on_an_h200():
    """15.0 GB of weights at 4.1 TB/s allow 273 tokens/s; 16 x 32k reads 84 GB a step; a prompt token takes 16 GFLOP."""
    spec = build_spec(SHAPES["llama-8b"])
    found = roofline.limits(
        spec, [Batch("one", 1, 128, 2), Batch("long", 16, 32768, 2), Batch("fill", 1, 1024, 2)], RATES
    )
    assert found["one.decode_tok_s"] == pytest.approx(273, rel=0.01)
    assert found["long.decode_tok_s"] == pytest.approx(16 / (84e9 / 4.1e12), rel=0.02)
    assert found["fill.prefill_tok_s"] == pytest.approx(795e12 / 14.2e9, rel=0.03)


def test_what_a_cpus_caches_hold_is_no_memory_limit(tmp_path, caplog):
    for core, level, size in ((0, 3, 32768), (1, 3, 32768), (2, 3, 32768), (3, 2, 1024)):
        folder = tmp_path / f"cpu{core}/cache/index0"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", f"{size}K"), ("shared_cpu_list", core // 2)):
            (folder / name).write_text(f"{text}\n")
    assert roofline.cache_bytes(tmp_path) == 64 << 20, "two of 32 MiB, one of them told by two cores"
    spec, batch = build_spec(SHAPES["qwen3-0.6b"]), [Batch("one", 1, 128, 2)]
    plain = roofline.limits(spec, batch, RATES)["one.decode_tok_s"]
    read = RATES["copy_bytes_s"] / plain
    assert roofline.limits(spec, batch, RATES | {"cache_bytes": read / 2})["one.decode_tok_s"] == pytest.approx(
        2 * plain, rel=1e-3
    )
    with caplog.at_level("INFO", "kvasir"):
        found = roofline.limits(spec, batch, RATES | {"cache_bytes": 2 * read})
    assert list(found) == ["one.prefill_tok_s"] and "fits the CPU's caches" in caplog.text


def test_a_codec_whose_step_caches_hold_has_no_limit_not_that_of_others():
    case = parse(
        "c",
        {
            "shape": "qwen3-0.6b",
            "arms": {"plain": {}, "few_bits": {"kv_codec": "int4"}},
            "workloads": {"w": {"batch": 8, "prompt": 8192, "output": 2}},
        },
    )
    config = SHAPES["qwen3-0.6b"]
    step = 8 * RATES["copy_bytes_s"] / compare._limits(case, config, {}, [*case.workloads], RATES)["w.decode_tok_s"]
    found = compare._limits(case, config, {}, [*case.workloads], RATES | {"cache_bytes": 0.9 * step})
    assert (
        found["w.decode_tok_s"]
        and limit_of(found, "w.decode_tok_s", "few_bits") is None
        and found["w.prefill_tok_s few_bits"]
    )


def test_a_mixture_reads_the_experts_that_are_hit():
    """Every expert is left out by a row with probability 1 - 8/128."""
    table = dict(
        SHAPES["qwen3-0.6b"],
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    spec = build_spec(table)
    expert = 3 * 1024 * 768 * 28
    one = cost.touched_params(spec, 1)
    assert cost.touched_params(spec, 64) - one == pytest.approx(expert * (128 * (1 - (15 / 16) ** 64) - 8))
    assert cost.touched_params(spec, 10**6) - one == pytest.approx(expert * 120)
    model = SimpleNamespace(spec=spec, weight_bytes=2, place=SimpleNamespace(dtype=torch.bfloat16))
    unread = cost.num_params(spec) - cost.touched_params(spec, 10**6)
    for prior, more in (
        (_roofline(model, torch.device("cpu"), torch.bfloat16, 1.0), 0),
        (drafting_roofline(SimpleNamespace(model=model, device=torch.device("cpu"))), unread),
    ):
        for rows in (1, 64, 10**6):
            assert prior.weight_bytes * prior.share_read(rows) == pytest.approx(
                2 * (cost.touched_params(spec, rows) + more)
            ), "as step times begin"


def test_rates_of_this_machine():
    found = roofline.machine_rates("cpu", "float32")
    assert found["dtype_bytes"] == 4 and 1e8 < found["copy_bytes_s"] < 1e13 and 1e8 < found["matmul_flop_s"] < 1e15
