"""Successor models: their answers are known, drafts from them are all right, and dummy weights give other answers."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from kvasir.api.offline.llm import LLM
from kvasir.bench.workloads import SHAPES
from kvasir.config import EngineConfig
from kvasir.convert import checkpoint as checkpoint_files
from kvasir.errors import ConfigError
from kvasir.models.families import build_spec
from kvasir.models.fill import Stored
from kvasir.models.loader import assign, check_weights, read_headers
from kvasir.types import SamplingParams
from kvasir_lab.bench import successor as made
from kvasir_lab.bench import turns
from tests.bench.test_turns import Here, small

NAME, VOCAB = "qwen3.5-9b", 512
PROMPTS = [[17, 400, 33, 21, 17, 400, 33], [250, 251]]


@pytest.fixture
def checkpoint(monkeypatch):
    small(monkeypatch, NAME, intermediate_size=32)
    with made.successor_checkpoint(NAME) as folder:
        yield folder


def answers(folder, **options):
    """Greedy answers of 24 tokens, and the least lead of a token over the second best."""
    config = EngineConfig.of(
        model=folder, device="cpu", skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64, **options
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
    with LLM(config=config) as llm:
        found = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
    tops = [sorted((p.logprob for p in row.values()), reverse=True) for one in found for row in one.logprobs]
    return [list(one.token_ids) for one in found], min(first - second for first, second, *_ in tops)


def chain(token, count):
    found = [token]
    for _ in range(count):
        found.append(made.successor(found[-1], VOCAB))
    return found[1:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_greedy_answer_is_the_chain_of_successors(dtype, checkpoint):
    found, lead = answers(checkpoint, dtype=dtype)
    assert found == [chain(p[-1], 24) for p in PROMPTS] and lead > 4


def test_dummy_weights_answer_otherwise(checkpoint):
    found, lead = answers(checkpoint, dtype="float32", load_format="dummy")
    expected = [chain(p[-1], 24) for p in PROMPTS]
    assert sum(a == b for x, y in zip(found, expected) for a, b in zip(x, y)) < 5 and lead < 0.1


@pytest.mark.parametrize("vocab", [2, 3, 10, 512, 248320])
def test_a_chain_has_every_token(vocab):
    assert math.gcd(made.step(vocab), vocab) == 1 and 0 < made.step(vocab) < vocab


def test_drafts_of_repeated_answers_are_all_accepted(monkeypatch, capsys, tmp_path):
    """In bf16, in which a verified row rounds differently on a GPU."""
    small(monkeypatch, NAME, intermediate_size=32)
    monkeypatch.setattr(turns, "Worker", Here)
    monkeypatch.setattr(turns, "BATCHES", (2,))
    monkeypatch.setattr(turns, "REPEATED", 52)
    output = tmp_path / "turns.json"
    given = dict(shared=64, new=16, turns=1, repeats=1, peer=None, site=None, output=output, commit="x")
    turns.run(dict(dtype="bfloat16", max_num_seqs=2, draft_control="fixed"), shape=NAME, **given)
    drafts = json.loads(output.read_text())["arms"][1]["metrics"]["repeated2.drafts"]
    assert drafts["same_outputs"] == 1 and drafts["acceptance"] == 1 and drafts["repeated_4grams"] == 0
    assert drafts["tokens_per_verification"] > 3


@pytest.mark.parametrize(
    "name", ["qwen3.5-9b", "qwen3.5-35b-a3b", "llama-8b-mla", "qwen3-0.6b", "gemma-3-27b", "gpt-oss-20b"]
)
def test_tensors_fit_shapes_of_every_kind(name):
    config = SHAPES[name] | {"tie_word_embeddings": False}
    tensors = made.tensors_of(config)
    spec = build_spec(config)
    stored = [Stored(n, Path("x"), "BF16", t.shape, 2 * math.prod(t.shape), 0) for n, t in tensors.items()]
    assign(stored, spec)
    quiet = [t.slot for t in tensors.values() if t.bound and t.slot.split(".")[-2] in made.LAST]
    assert len({slot.split(".")[1] for slot in quiet}) == len(spec.layers) and len(quiet) >= 2 * len(spec.layers)


def test_shards(monkeypatch):
    small(monkeypatch, NAME, intermediate_size=32)
    monkeypatch.setattr(made, "SHARD", 40_000)
    with made.successor_checkpoint(NAME) as folder:
        check_weights(Path(folder), json.loads((Path(folder) / "config.json").read_text()))
        assert len({t.file for t in read_headers(Path(folder))}) > 2
    assert not Path(folder).exists()


def test_what_cannot_be_written(monkeypatch):
    small(monkeypatch, NAME, intermediate_size=32)
    with pytest.raises(ConfigError, match="no shape named"), made.successor_checkpoint("qwen"):
        pass
    with pytest.raises(ConfigError, match="'llama-8b-f8' is quantised"), made.successor_checkpoint("llama-8b-f8"):
        pass
    monkeypatch.setattr(made.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="0.0 GB free. Set TMPDIR"), made.successor_checkpoint(NAME):
        pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_disk_that_fills_up(error, monkeypatch):
    def write(*_):
        raise error

    small(monkeypatch, NAME, intermediate_size=32)
    monkeypatch.setattr(checkpoint_files, "write_tensors", write)
    with pytest.raises(ConfigError, match="No space left on device. Set TMPDIR"), made.successor_checkpoint(NAME):
        pass
