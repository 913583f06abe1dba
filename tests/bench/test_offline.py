"""``kvasir bench offline`` at tiny size: its measurements, its refusals, and a peer in the same run."""

import contextlib
import json
import random
import tempfile
from pathlib import Path

import pytest

from kvasir.bench import offline
from kvasir.bench.offline import measure, rounds
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from tests.bench.test_result import check

TINY = ["one:1:8:56", "three:3:5:48"]  # enough tokens to tell them from the first on a busy machine


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """These tests are about what is reported, so a busy machine gets more attempts."""
    monkeypatch.setattr(offline, "ATTEMPTS", 30)


def run(capsys, config=None, **options):
    offline.run(
        config or EngineConfig(),
        **{"shape": None, "workloads": TINY, "peer": None, "repeats": 1, "output": None, **options},
    )
    printed = capsys.readouterr().out
    return json.loads(options["output"].read_text() if "output" in options else printed)


def test_it_produces_a_result(capsys, tmp_path):
    found = run(capsys, EngineConfig.of(max_num_seqs=4, num_threads=1), repeats=2, output=tmp_path / "r.json")
    check(found)
    (only,) = found["arms"]
    assert only["config"] == {"max_num_seqs": 4, "num_threads": 1, "enable_prefix_caching": False}, (
        "the settings that are not the defaults"
    )
    assert set(only["metrics"]) == {
        "start_s",
        *(f"{name}.{kind}_tok_s" for name in ("one", "three") for kind in ("prefill", "decode", "total")),
    }
    assert all(
        m["n"] == 2 and 0 < m["min"] <= m["median"] <= m["max"] for k, m in only["metrics"].items() if k != "start_s"
    )
    assert found["ratios"] == {}


def test_a_peer_runs_in_the_same_run(capsys):
    found = run(capsys, peer="transformers")
    check(found)
    kvasir, peer = found["arms"]
    assert (kvasir["name"], peer["name"]) == ("kvasir", "transformers") and set(kvasir["metrics"]) == set(
        peer["metrics"]
    )
    key = "three.decode_tok_s"
    assert found["ratios"][f"{key} kvasir/transformers"] == pytest.approx(
        kvasir["metrics"][key]["median"] / peer["metrics"][key]["median"], abs=1e-3
    )


def test_a_shape_has_random_weights_and_leaves_no_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small = SHAPES["qwen3-0.6b"] | dict(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=64,
    )
    monkeypatch.setitem(SHAPES, "small", small)
    found = run(capsys, shape="small", peer="transformers")
    check(found)
    assert (
        found["case"] == "offline-small"
        and found["arms"][0]["config"]["shape"] == "small"
        and "model" not in found["arms"][0]["config"]
    )
    assert not list(tmp_path.glob("kvasir-*"))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(peer="vllm"), "there is transformers"),
        (dict(shape="llama-9b"), "Did you mean 'llama-8b'"),
        (dict(workloads=["a:1:8"]), "expected NAME:"),
        (dict(workloads=["a:1:8:4", "a:2:8:4"]), "same name"),
        (dict(workloads=["a:1:4090:20"]), "do not fit the context of 4096"),
    ],
)
def test_refusals(capsys, options, message):
    with pytest.raises(ConfigError, match=message):
        run(capsys, **options)


def test_what_is_measured():
    """Each round runs one token and then the whole output, arm after arm; the first round does not count."""
    calls = []

    def seconds(name):
        return lambda prompts, count: (
            calls.append((name, len(prompts), {len(p) for p in prompts}, count)) or 1.0 * count
        )

    arms = {name: seconds(name) for name in ("a", "b")}
    found = measure(arms, [Batch("w", 3, 5, 7)], 1000, repeats=2)
    a_round = [(name, 3, {5}, count) for name in ("a", "b") for count in (1, 7)]
    assert calls == a_round * 3
    assert all(v["n"] == 2 for name in arms for v in found[name].values())


def test_rates():
    """2 prompts of 10 tokens and 5 output tokens each take 0.5 s to the first token, and 2.5 s in all."""
    found = measure({"a": lambda prompts, count: 0.5 if count == 1 else 2.5}, [Batch("w", 2, 10, 5)], 1000, repeats=1)[
        "a"
    ]
    assert {k: v["median"] for k, v in found.items()} == {
        "w.prefill_tok_s": 40.0,
        "w.decode_tok_s": 4.0,
        "w.total_tok_s": 4.0,
    }


def test_a_round_has_the_same_prompts_wherever_it_runs():
    def sent(first, repeats):
        seen = []
        rounds(
            {"a": lambda prompts, count: seen.append(prompts) or 1.0 * count}, Batch("w", 2, 6, 3), 1000, repeats, first
        )
        return seen[::2]

    assert sent(0, 3) == sent(0, 2) + sent(2, 1), "the peer's second run goes on where its first one stopped"
    assert len({str(p) for p in sent(0, 3)}) == 3


@pytest.mark.parametrize(
    "text", ["", "a", "a:1:2", "a:1:2:3:4", "a:x:2:3", "a:0:2:3", "a:1:0:3", "a:1:2:1", "a:-1:2:3"]
)
def test_bad_workloads(text):
    with pytest.raises(ConfigError, match="workload"):
        Batch.parse(text)


def test_prompts_stay_clear_of_special_tokens_and_repeat():
    batch = Batch.parse("a:4:100:2")
    prompts = batch.prompts(2048, random.Random(0))
    assert [len(p) for p in prompts] == [100] * 4 and prompts == batch.prompts(2048, random.Random(0))
    assert all(32 <= t < 2048 - 32 for p in prompts for t in p)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_we_serve(name):
    from kvasir.models import checkpoint
    from kvasir.models.families import build_spec

    with shape_folder(name) as folder:
        config = SHAPES[name].get("text_config", SHAPES[name])
        assert len(build_spec(checkpoint.read_config(Path(folder))).layers) == config["num_hidden_layers"]
    assert not Path(folder).exists()


def test_a_load_says_how_many_ran_at_once():
    with contextlib.ExitStack() as stack:
        config = EngineConfig.of(
            model="nano", device="cpu", num_threads=1, max_num_seqs=2, max_model_len=64, enable_prefix_caching=False
        )
        generate, _ = offline.own_engine(config, stack)
        assert (
            generate([[5, 6, 7]] * 3, 4) == {"at_once": 2, "preemptions": 0, "cached": 0}
            and generate([[5, 6, 7]], 2)["at_once"] == 1
        )


def test_decoding_alone_computes_the_prompts_once(caplog):
    with contextlib.ExitStack() as stack:
        config = EngineConfig.of(model="nano", device="cpu", num_threads=1, max_num_seqs=4, max_model_len=128)
        generate, llm = offline.own_engine(config, stack)
        found = offline.decoding(offline.timed(generate), Batch("x", 2, 64, 40), 500, repeats=2, life=0)
        assert (
            list(found) == ["x.decode_tok_s"] and len(found["x.decode_tok_s"]) == 2 and min(found["x.decode_tok_s"]) > 0
        )
        again = caplog.text.count("both are measured again")  # on a busy machine
        assert llm.engine.pages.cached_tokens == 2 * (5 + 2 * again) * 48, (
            "both prompts except their last pages, in both runs of both rounds and in one run before"
        )
        before = llm.engine.pages.cached_tokens
        caplog.clear()
        offline.decoding(offline.timed(generate), Batch("y", 1, 96, 30), 500, repeats=1, life=0)
        again = caplog.text.count("both are measured again")
        assert llm.engine.pages.cached_tokens - before == 64 + (3 + 2 * again) * 80, (
            "a longer prompt begins with the shorter one"
        )


def test_a_round_that_says_nothing_is_run_again(caplog):
    """The first run on cached prompts, which compiles, does not count. A delayed short run is repeated."""
    batch, took = Batch("x", 2, 8, 11), iter([9.0, 5.0, 1.0, 3.0, 4.0, 3.0, 1.0, 3.0])
    assert offline.decoding(lambda prompts, count: next(took), batch, 500, repeats=2, life=0) == {
        "x.decode_tok_s": [10.0, 10.0]
    }
    assert "both are measured again" in caplog.text and not list(took)
    took = iter([4.0, 3.0, 1.0, 3.0])
    assert rounds({"a": lambda prompts, count: next(took)}, batch, 500, 1, kinds=("decode",)) == {
        "a": {"x.decode_tok_s": [10.0]}
    }
    with pytest.raises(ConfigError, match="took no longer than one token"):
        rounds({"a": lambda prompts, count: 1.0}, batch, 500, 1)
