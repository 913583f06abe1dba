"""Qwen 3.5's shapes as they are published, small forms of them on a CPU, and the bench of an agent's turns."""

from __future__ import annotations

import json

import pytest

from kvasir.bench.workloads import SHAPES
from kvasir.errors import ConfigError
from kvasir.models import cost
from kvasir.models.families import build_spec
from kvasir_lab.bench import turns

SMALL = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=512,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    max_position_embeddings=512,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)


@pytest.mark.parametrize("name, billions, states", [("qwen3.5-9b", 8.95, 24), ("qwen3.5-35b-a3b", 34.66, 30)])
def test_shapes_are_the_published_ones(name, billions, states):
    spec = build_spec(SHAPES[name])
    assert cost.num_params(spec) / 1e9 == pytest.approx(billions, abs=0.01)
    assert sum(layer.mixer.kind == "gated_delta" for layer in spec.layers) == states


def small(monkeypatch, name="qwen3.5-9b", **changes):
    shape = SHAPES[name]
    parts = {"text_config": shape["text_config"] | SMALL | changes} if "text_config" in shape else SMALL | changes
    monkeypatch.setitem(SHAPES, name, shape | parts | {"vocab_size": SMALL["vocab_size"]})
    monkeypatch.setattr(turns, "REPEATED", 96)
    monkeypatch.setattr(turns, "ANSWER", 20)
    monkeypatch.setattr(turns, "BATCHES", (1,))
    return name


class Here:
    """A worker without a process of its own."""

    def __init__(self, name, folder, options, site=None):
        from contextlib import ExitStack

        from kvasir.bench.offline import own_engine, timed
        from kvasir.config import EngineConfig

        self.stack, self.name, self.counts = ExitStack(), name, {}
        self.generate, llm = own_engine(EngineConfig.of(model=folder, device="cpu", **options), self.stack)
        self.timed = timed(self._run)
        self.facts = {"start_s": 0.0, "version": "x", "state_share": llm.engine.runner.pool.state_share()}

    def _run(self, prompts, num_tokens, *stop):
        self.counts = self.generate(prompts, num_tokens, *stop)

    def seconds(self, prompts, num_tokens):
        return self.timed(prompts, num_tokens)

    def complete(self, prompts, num_tokens, stop):
        self.counts = self.generate(prompts, num_tokens, stop)
        return 1.0 + num_tokens, self.counts["outputs"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()


@pytest.mark.parametrize("name", ["qwen3.5-9b", pytest.param("qwen3.5-35b-a3b", marks=pytest.mark.slow)])
def test_a_turn_finds_the_conversation(name, monkeypatch, capsys, tmp_path):
    small(monkeypatch, name, intermediate_size=32, **(EXPERTS if "a3b" in name else {}))
    monkeypatch.setattr(turns, "Worker", Here)
    output = tmp_path / "turns.json"
    settings = dict(dtype="float32", max_num_seqs=2, draft_control="fixed")
    turns.run(
        settings, shape=name, shared=96, new=40, turns=2, repeats=1, peer=None, site=None, output=output, commit="x"
    )
    plain, drafted = json.loads(output.read_text())["arms"]
    metrics = plain["metrics"]
    hits = metrics["turns.hit_tokens"]["values"]
    assert metrics["turns.prompt_tokens"]["values"] == [136, 176]
    assert hits[0] == 96 and 96 < hits[1] <= 136, "a turn starts from the end of the turn before"
    assert 0 < metrics["state_share"] < 1 and metrics["turns.cold_s"]["n"] == 2
    drafts = drafted["metrics"]["repeated1.drafts"]
    assert drafts["same_outputs"] == 1 and "turns.turn_s" not in drafted["metrics"]
    assert drafts["acceptance"] > 0.5, "an answer is what was answered before"


class Counted:
    """A worker that computes nothing and has a prefix cache: tokens of a prompt that it has not seen take a second
    each, and those of an answer a tenth of one."""

    name, facts = "kvasir", {"start_s": 1.0, "version": "x"}

    def __init__(self, name, folder, options, site=None):
        self.seen, self.counts = set(), {}
        if options.get("drafter") == turns.DRAFTER:
            raise self.fails

    def seconds(self, prompts, num_tokens):
        new = [p for p in prompts if tuple(p) not in self.seen]
        self.seen |= set(map(tuple, prompts))
        return sum(map(len, new)) + 0.1 * num_tokens

    def complete(self, prompts, num_tokens, stop):
        return self.seconds(prompts, num_tokens), [[1] * num_tokens for _ in prompts]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("fails, last", [(ConfigError("refused"), "transformers"), (SystemExit(143), "kvasir")])
def test_rates_leave_prompts_out_and_other_arms_are_kept(fails, last, monkeypatch, capsys, tmp_path):
    small(monkeypatch)
    monkeypatch.setattr(turns, "Worker", Counted)
    monkeypatch.setattr(turns, "check_peer", lambda *_: None)
    monkeypatch.setattr(Counted, "fails", fails, raising=False)
    output, given = tmp_path / "turns.json", dict(shared=96, new=40, turns=1, repeats=1, site=None, commit="x")
    turns.run({}, shape="qwen3.5-9b", peer="transformers", output=output, **given)
    found = json.loads(output.read_text())
    assert [a["name"] for a in found["arms"]][-1] == last and "suffix" not in [a["name"] for a in found["arms"]]
    assert found["arms"][0]["metrics"]["repeated1.decode_tok_s"]["median"] == pytest.approx(19 / 1.9)


def test_targets_are_judged():
    def spread(value):
        return {"median": value}

    own = {"turns.cold_s": spread(1.0), "turns.turn_s": spread(0.1), "repeated1.decode_tok_s": spread(10.0)}
    arms = [{"name": n, "config": {}, "metrics": own | {"repeated1.decode_tok_s": spread(r)}} for n, r in
            (("kvasir", 10.0), (turns.DRAFTER, 12.0))]  # fmt: skip
    targets = turns._result("x", arms)["targets"]
    assert targets["first_token turn/cold kvasir"]["met"] and not targets["repeated1.decode_tok_s suffix/kvasir"]["met"]
