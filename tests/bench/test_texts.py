"""Drafts compared with a peer's on prompts with structure: real processes, with a stand-in for vLLM."""

import contextlib
import importlib.util

import pytest

from kvasir.bench import compare, roofline, texts
from kvasir.bench.case import parse
from kvasir.bench.worker import Worker
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.errors import ConfigError
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.bench.helpers import SITE, SMALL, log_of
from tests.bench.test_result import check

DRAFTING = {"method": "ngram_gpu", "num_speculative_tokens": 4}
TABLE = {
    "model": "nano",
    "repeats": 1,
    "rounds": 2,
    "settings": {"num_threads": 1, "device": "cpu", "max_model_len": 512},
    "arms": {"off": {}, "ngram": {"drafter": "ngram", "draft_control": "fixed"}},
    "peer": {
        "name": "vllm",
        "repeats": [2, 0],
        "options": {"max_model_len": 512},
        "variants": {"vllm_ngram": {"speculative_config": DRAFTING}},
    },
    "workloads": {"problems": {"batch": 4, "prompt": 300, "output": 24, "text": "tasks"}},
}


@pytest.fixture(autouse=True)
def rated(monkeypatch, tmp_path):
    monkeypatch.setattr(
        roofline, "machine_rates", lambda device, dtype: {"copy_bytes_s": 1e10, "matmul_flop_s": 1e11, "dtype_bytes": 4}
    )
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    monkeypatch.setitem(SHAPES, "small", SMALL)


def test_problems_for_both_engines(tmp_path):
    found = compare.measure(parse("c", TABLE), peer=True, site=SITE)
    check(found)
    arms = {a["name"]: a["metrics"] for a in found["arms"]}
    off, ngram, vllm, drafting = (arms[name]["problems.drafts"] for name in ("off", "ngram", "vllm", "vllm_ngram"))
    assert ngram["same_outputs"] == drafting["same_outputs"] == 1 and ngram["tokens"] == off["tokens"]
    assert ngram["drafted"] > ngram["accepted"] >= 0 and "drafted" not in off and "drafted" not in vllm
    assert (drafting["acceptance"], drafting["tokens_per_verification"]) == (0.75, 4), "as the stand-in counts"
    assert 0 <= off["repeated_4grams"] < 1 and vllm["repeated_4grams"] > 0.7, "the stand-in says one word"
    assert arms["ngram"]["problems.decode_tok_s"]["n"] == arms["vllm_ngram"]["problems.decode_tok_s"]["n"] == 2
    assert {"problems.decode_tok_s ngram/off", "problems.decode_tok_s ngram/vllm_ngram"} <= set(found["ratios"])
    asked = log_of(tmp_path / "log")
    starts = [e["options"] for e in asked if e["op"] == "start"]
    assert [s.get("disable_log_stats") for s in starts] == [None, False] and starts[1]["speculative_config"] == DRAFTING
    sent = [(e["prompts"], e["count"]) for e in asked if e["op"] == "generate"]
    assert len(sent) == 16 and sent[:8] == sent[8:] and len({p for p, _ in sent}) == 4, (
        "two lives of two rounds that warm up, and two"
    )
    assert [count for _, count in sent[:4]] == [1, 24, 1, 24]


def test_random_weights_that_both_read(monkeypatch):
    """The weights are written once, and every engine gets the folder; none makes random weights of its own."""
    lives = []

    class Still(Worker):
        def __init__(self, name, model, options, site=None):
            lives.append((name, model, options))
            self.name, self.facts, self.counts = name, {"start_s": 1.0}, {"drafted": 8, "accepted": 6, "verified": 2}

        def complete(self, prompts, num_tokens, stop):
            return 0.001 * num_tokens, [[1, 2] * (num_tokens // 2) for _ in prompts]

        def close(self):
            pass

    @contextlib.contextmanager
    def written(shape):
        with shape_folder(shape) as folder:
            yield folder

    monkeypatch.setattr(compare, "Worker", Still)
    monkeypatch.setattr(compare, "random_checkpoint", written)
    table = TABLE | {"shape": "small", "model": "", "on_disk": True}
    table["workloads"] = {"again": {"batch": 2, "prompt": 100, "output": 8, "text": "repeated"}}
    found = compare.measure(parse("c", table), peer=True, site=SITE)
    check(found)
    assert found["arms"][0]["metrics"]["again.drafts"] == {
        "tokens": 16,
        "repeated_4grams": 0.6,
        "same_outputs": 1,
        "drafted": 8,
        "accepted": 6,
        "verified": 2,
        "acceptance": 0.75,
        "tokens_per_verification": 4,
    }
    assert found["arms"][0]["metrics"]["again.decode_tok_s"]["median"] == pytest.approx(14 / 0.007)
    assert [name for name, _, _ in lives] == ["vllm", "vllm", "kvasir", "kvasir"] and len(
        {model for _, model, _ in lives}
    ) == 1
    assert not any("load_format" in options for _, _, options in lives) and lives[2][2]["skip_tokenizer_init"]


def test_prompts():
    made = texts.Texts("nano", 640)
    prompts, stop = made.prompts("repeated", Batch("a", 3, 100, 2), 0)
    assert (
        stop == []
        and all(len(p) == 100 and p[:52] == p[48:] and len(set(p)) > 30 for p in prompts)
        and prompts[0] != prompts[1]
    )
    problems, stop = made.prompts("tasks", Batch("a", 8, 400, 2), 0)
    assert stop == [shipped_tokenizer().token_to_id("<|im_end|>")] and len({tuple(p) for p in problems}) == 8
    assert (
        problems == made.prompts("tasks", Batch("b", 8, 400, 2), 0)[0]
        and problems != made.prompts("tasks", Batch("a", 8, 400, 2), 1)[0]
    )
    edits, _ = made.prompts("edits", Batch("a", 8, 1000, 2), 0)
    assert min(map(len, edits)) > 60
    with pytest.raises(ConfigError, match="allow prompts of more than 20"):
        made.prompts("tasks", Batch("a", 8, 20, 2), 0)


def test_vllms_ngram_needs_its_package():
    table = TABLE | {"peer": {"name": "vllm", "options": {"speculative_config": {"method": "ngram"}}}}
    if importlib.util.find_spec("numba") is not None:
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match="pip install numba"):
        compare.measure(parse("c", table), peer=True, site=SITE)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"workloads": {"w": {"batch": 1, "prompt": 8, "output": 8, "text": "poems"}}},
            "'poems' is none of random, repeated, tasks, edits",
        ),
        ({"cached": True}, "prompts that are not cached"),
        ({"peer": {"name": "transformers"}}, "no other peer than vllm"),
        ({"model": "", "shape": "small"}, "a model of the lab"),
        ({"on_disk": True}, "on_disk needs a shape"),
    ],
)
def test_what_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        parse("c", TABLE | change)
