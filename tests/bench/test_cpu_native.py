"""``python -m kvasir_lab.kernels native`` without engines: a noisy workload loses no other workload's figures."""

from __future__ import annotations

import json
import sys
from itertools import count
from types import SimpleNamespace

import pytest

from kvasir_lab.kernels import native as tool
from kvasir_lab.kernels.__main__ import main


@pytest.mark.parametrize(
    ("codec", "arms"),
    [
        ((), {"native", "plain", "bf16"}),
        (("--kv-codec", "int4"), {"native-plain", "native-int4", "torch-int4"}),
    ],
)
def test_a_workload_that_is_too_noisy_costs_none_of_the_others(codec, arms, tmp_path, monkeypatch, capsys):
    def own(config, native, stack):
        return None, SimpleNamespace(
            info=SimpleNamespace(tokenizer_size=500),
            engine=SimpleNamespace(runner=SimpleNamespace(native=native or None)),
        )

    def seconds(prompts, num_tokens):
        return 1.0 if len(prompts) == 2 else 1.0 + num_tokens / next(clock)

    clock = count(10)
    monkeypatch.setattr(tool, "own", own)
    monkeypatch.setattr(tool, "timed", lambda generate: seconds)
    workloads = ("--workload", "held-up:2:8:4", "--workload", "quiet:3:8:4")
    monkeypatch.setattr(sys, "argv", [])
    assert main(["native", str(tmp_path / "r.json"), "--repeats", "2", *codec, *workloads]) == 1
    assert capsys.readouterr().err.endswith("too noisy, so measured in part or not at all: held-up\n")
    found = {arm["name"]: arm["metrics"] for arm in json.loads((tmp_path / "r.json").read_text())["arms"]}
    assert set(found) == arms
    assert all(
        metrics["quiet.decode_tok_s"]["n"] == 2 and not any(name.startswith("held-up") for name in metrics)
        for metrics in found.values()
    )
