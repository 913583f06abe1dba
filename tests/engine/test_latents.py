"""Models with latent attention through the engine: the same tokens alone, in a crowd, after preemption, at any chunk
size, from the prefix cache, and with drafters; what runs their steps; and what is refused at the start."""

from __future__ import annotations

import json

import pytest
import torch

from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.layers.mixers.mla import Mixer
from kvasir.layers.spec import MLASpec
from kvasir.layers.weights import Placement
from kvasir.models.families import build_spec
from kvasir.models.native_decoder import why_not
from tests import checkpoints
from tests.adapters import write_adapter
from tests.engine.driver import Driver
from tests.hooks import write_hooks

LENGTHS, OUTPUT = (5, 33, 41), 12
WAYS = {
    "one row a step": dict(max_num_batched_tokens=3),
    "chunks of seven": dict(max_num_batched_tokens=7),
    "a crowd": dict(max_num_batched_tokens=64, preempt_every=3),
    "a tight pool": dict(max_num_batched_tokens=16, num_pages=8, max_model_len=112),
    "static buffers": dict(max_num_batched_tokens=64, static=True),
    "captured pieces": dict(max_num_batched_tokens=64, pieces=True),
    "n-grams": dict(drafter="ngram:min_match=1", draft_control="fixed", max_num_batched_tokens=64),
    "trees": dict(drafter="token_recycling", draft_control="fixed", max_num_batched_tokens=64),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dense blocks, a low-rank product of queries and yarn."""
    path = tmp_path_factory.mktemp("latents")
    return str(checkpoints.write(path, "deepseek_v3", first_k_dense_replace=3, n_group=1, topk_group=1))


def prompts():
    shared = [1 + (7 * i) % 90 for i in range(50)]
    return [shared[: length - 2] + [3 + k, 4 + 2 * k] for k, length in enumerate(LENGTHS)]


def tokens_of(folder: str, preempt_every: int = 0, alone: bool = False, **options) -> dict:
    """Tokens of every request and branch at T = 0 and at T = 1, and how many drafts were accepted."""
    driver = Driver(folder, max_model_len=options.pop("max_model_len", 128), max_num_seqs=8, **options)
    asked = [
        driver.request(f"{temperature}-{k}", ids, temperature=temperature, max_tokens=OUTPUT, ignore_eos=True,
                       seed=7 + k, n=2)
        for temperature in (0.0, 1.0)
        for k, ids in enumerate(prompts())
    ]  # fmt: skip
    for some in [[request] for request in asked] if alone else [asked]:
        driver.run(some, preempt_every=preempt_every)
    assert not driver.errors
    found = {key: out.tokens for key, out in driver.outputs.items()}
    accepted = driver.engine.stats().accepted_tokens
    driver.close()
    return {"tokens": found, "accepted": accepted}


@pytest.fixture(scope="module")
def reference(folder):
    made = {}

    def get(codec: str) -> dict:
        if codec not in made:
            made[codec] = tokens_of(
                folder, alone=True, max_num_batched_tokens=256, enable_prefix_caching=False, kv_codec=codec
            )["tokens"]
        return made[codec]

    return get


@pytest.mark.parametrize("way", list(WAYS))
def test_the_same_tokens(folder, reference, way):
    found = tokens_of(folder, **WAYS[way])
    assert found["tokens"] == reference("plain")
    assert ("drafter" in WAYS[way]) == bool(found["accepted"])


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_codes_lose_precision_at_the_write_only(folder, reference, codec):
    found = tokens_of(folder, kv_codec=codec, max_num_batched_tokens=7, preempt_every=3, page_slots=16)
    assert found["tokens"] == reference(codec)


def test_a_row_that_depends_on_its_batch_shows(folder, reference, monkeypatch):
    """Negative control: a latent that depends on the row's place in its step gives other tokens in chunks."""
    real = PlainCodec.write_row

    def wrong(self, cache, row_TD, slots_T, shared=None):
        place = torch.arange(len(row_TD)).unsqueeze(1)
        real(self, cache, row_TD * (1 + 0.02 * place), slots_T, shared)

    expected = reference("plain")
    monkeypatch.setattr(PlainCodec, "write_row", wrong)
    assert tokens_of(folder, **WAYS["chunks of seven"])["tokens"] != expected


def test_tapes_run_dense_models(folder):
    """On a CPU in normal mode decodes are recorded, and give the tokens of plain steps."""
    options = dict(batch_invariant=False, max_num_batched_tokens=64)
    driver = Driver(folder, max_model_len=128, **options)
    tapes = [way for way in driver.engine.runner.ways if isinstance(way, DecodeTapes)]
    parts = driver.engine.runner.parts
    assert tapes and "not plain grouped-query attention" in why_not(parts.model, parts.caches, parts.backend)
    ask = [driver.request(f"{k}", ids, temperature=0.0, max_tokens=OUTPUT) for k, ids in enumerate(prompts())]
    driver.run(ask)
    assert tapes[0]._steps
    plain = Driver(folder, max_model_len=128, **options)
    plain.engine.runner.use([way for way in plain.engine.runner.ways if not isinstance(way, DecodeTapes)])
    plain.run([plain.request(f"{k}", ids, temperature=0.0, max_tokens=OUTPUT) for k, ids in enumerate(prompts())])
    assert {k: o.tokens for k, o in driver.outputs.items()} == {k: o.tokens for k, o in plain.outputs.items()}
    driver.close()
    plain.close()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(kv_codec="int4"), "'int4' is for heads of keys and values.*plain, int8 or fp8"),
        (dict(kv_codec="nvfp4"), "'nvfp4' is for heads of keys and values.*plain, int8 or fp8"),
        (dict(attention_backend="flash_attn"), "this model caches latents.*--attention-backend auto"),
    ],
)
def test_what_has_heads_only_is_refused(folder, options, why):
    with pytest.raises(ConfigError, match=why):
        Driver(folder, max_model_len=128, **options)


def test_hooks_act_between_the_latent_attention_and_its_output(folder, tmp_path):
    """Each site alone in a batch of all, chunked and preempted; a set that is closed changes nothing."""
    shape = (3, 4, 10, 32)
    gates = {
        "head_out": Gate(answers=True),
        "attn_out": Gate(),
        "resid": Gate(window=(2, 30)),
        "closed": Gate(window=(400, 401)),
    }
    sets = []
    for name, gate in gates.items():
        hook = Hook("head_out" if name == "closed" else name, (0, 1, 2), "rotate:c=-1", gate)
        sets.append(f"{name}={write_hooks(tmp_path / name, [hook], shape=shape)}")
    options = dict(max_model_len=128, max_num_seqs=8, hook=tuple(sets))
    found = {}
    for way, more in {"alone": {}, "together": dict(max_num_batched_tokens=9)}.items():
        driver = Driver(folder, **options, **more)
        asked = [
            driver.request(name or "plain", prompts()[1], hook=name or None, max_tokens=OUTPUT, ignore_eos=True, seed=3)
            for name in [*gates, ""]
        ]
        for some in [asked] if way == "together" else [[request] for request in asked]:
            driver.run(some, preempt_every=3 if way == "together" else 0)
        assert not driver.errors
        found[way] = {key[0]: out.tokens for key, out in driver.outputs.items()}
        driver.close()
    assert found["alone"] == found["together"]
    assert found["alone"]["closed"] == found["alone"]["plain"]
    assert len({tuple(tokens) for tokens in found["alone"].values()}) == 4, "a site changes nothing"


def test_an_adapter_of_latent_attention_is_to_be_merged(folder, tmp_path):
    adapter = write_adapter(tmp_path / "a", model=folder)
    with pytest.raises(ConfigError, match="merge_lora"):
        Driver(folder, max_model_len=128, enable_lora=True, lora_modules=(f"a={adapter}",))


def test_a_layer_that_reads_another_cache_is_refused():
    spec = MLASpec(2, 16, 8, 8, 8, 1.0)
    with pytest.raises(ConfigError, match="keep their own. Leave out cache_of"):
        Mixer(spec, 32, Placement(torch.device("cpu"), torch.float32), writes=False)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_indexes_are_refused(model_type):
    with pytest.raises(ConfigError, match="dense attention would be another model"):
        build_spec({"model_type": model_type, "architectures": ["X"]})


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(index_topk=2048), "index_topk .*dense attention is another model"),
        (dict(qk_rope_head_dim=7), "expected an even number"),
        (dict(scoring_func="softmax"), "scored by sigmoids"),
        (dict(n_group=5), "n_group is 5: 6 experts"),
        (dict(moe_layer_freq=2), "moe_layer_freq is 2"),
    ],
)
def test_fields_that_change_the_model_are_refused(changes, why, tmp_path):
    config = json.loads((checkpoints.write(tmp_path, "deepseek_v3") / "config.json").read_text())
    with pytest.raises(ConfigError, match=why):
        build_spec(config | changes)
