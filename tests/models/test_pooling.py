"""What a checkpoint was made for is read from its folder; what is not served is refused with the reason."""

from __future__ import annotations

import fnmatch
import json

import pytest
import torch

from kvasir.convert.checkpoint import copy_rest
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import UNWANTED, WANTED, read_config
from kvasir.models.families import build_spec
from kvasir.models.loader import assign, load_model, read_headers
from kvasir.models.pooling import read_pooling
from kvasir.types import Pooling
from tests import checkpoints, pooling_checkpoints
from tests.models.small_tokenizers import byte_level


def read(folder, task="auto", name=""):
    return read_pooling(folder, read_config(folder), task, name)


@pytest.fixture
def causal(tmp_path):
    return checkpoints.write(tmp_path / "plain", "qwen3")


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_a_folder_of_sentence_transformers(tmp_path, mode):
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    folder = pooling_checkpoints.embedding(tmp_path / "m", rows=mode, prompts=prompts, normalize=mode != "cls_token")
    found = read(folder)
    rows = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}[mode]
    assert found == Pooling(task="embed", rows=rows, activation=mode != "cls_token", width=32, prompts=prompts)
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode": mode.removesuffix("_tokens").removesuffix("_token")}))
    assert read(folder) == found, "the spelling of newer folders"


@pytest.mark.parametrize("variant", ["llama", "qwen2", "mistral_full", "gemma3_text"])
def test_a_checkpoint_without_a_head_embeds(tmp_path, variant):
    folder = pooling_checkpoints.embedding(tmp_path / "m", rows=None, variant=variant)
    assert read_config(folder)["architectures"][0].endswith("Model")
    pooling = read(folder)
    assert pooling == Pooling(task="embed", width=32)
    model = load_model(folder, read_config(folder), device="cpu", dtype=torch.float32, pooling=pooling)
    assert model.head.tensor is model.embed_VE and "head.weight" not in model.slots()


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_with_and_without_the_prefix(tmp_path, headless, tied):
    """Qwen3-Embedding stores ``layers.0...`` under the architecture of a model that generates."""
    folder = pooling_checkpoints.embedding(tmp_path / "m", headless=headless, tie_word_embeddings=tied)
    names = {t.name for t in read_headers(folder)}
    assert ("embed_tokens.weight" in names) == headless
    model = load_model(folder, read_config(folder), device="cpu", dtype=torch.float32, pooling=read(folder))
    stored = dict.fromkeys(names)
    assert len(assign(read_headers(folder), model.spec).placed) == len(stored) - ("lm_head.weight" in stored)


def test_a_missing_tensor_is_named_as_the_checkpoint_would(tmp_path):
    folder = pooling_checkpoints.embedding(tmp_path / "m", num_hidden_layers=2)
    checkpoints.edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=3, layer_types=None))
    with pytest.raises(ConfigError, match=r"missing tensors: layers\.2\."):
        load_model(folder, read_config(folder), device="cpu", dtype=torch.float32, pooling=read(folder))


def test_a_reranker_with_a_head(tmp_path):
    folder = pooling_checkpoints.classifier(tmp_path / "m")
    found = read(folder)
    assert (found.task, found.labels, found.activation) == ("score", 1, True) and found.template is not None
    for name, active in (("torch.nn.modules.linear.Identity", False), ("torch.nn.modules.activation.Sigmoid", True)):
        checkpoints.edit_json(
            folder / "config.json", lambda c, n=name: c.update(sentence_transformers={"activation_fn": n})
        )
        assert read(folder).activation is active
    checkpoints.edit_json(
        folder / "config.json", lambda c: c.update(sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    )
    with pytest.raises(ConfigError, match="activation torch.nn.Tanh"):
        read(folder)


@pytest.mark.parametrize("how", ["name", "config", "module", "told"])
def test_a_reranker_by_two_tokens(causal, how):
    backend = byte_level()
    backend.add_tokens(["no", "yes"])
    backend.save(str(causal / "tokenizer.json"))
    ids = backend.token_to_id("no"), backend.token_to_id("yes")
    assert read(causal) is None
    if how == "config":
        checkpoints.edit_json(causal / "config.json", lambda c: c.update(classifier_from_token=["no", "yes"]))
    if how == "module":
        (causal / "1_LogitScore").mkdir()
        (causal / "modules.json").write_text('[{"path": "1_LogitScore", "type": "a.b.LogitScore"}]')
        stored = {"true_token_id": ids[1], "false_token_id": ids[0]}
        (causal / "1_LogitScore" / "config.json").write_text(json.dumps(stored))
    found = read(causal, "score" if how == "told" else "auto", "Qwen/Qwen3-Reranker-0.6B" if how == "name" else "")
    assert (found.task, found.tokens, found.labels) == ("score", ids, 0)


def test_a_model_that_generates_stays_one(causal):
    assert read(causal) is None is read(causal, "generate")
    assert read(causal, "embed") == Pooling(task="embed", width=32)
    assert read(causal, "generate", "my-reranker") is None, "the setting wins over the name"


def test_the_classes_of_a_family_are_told_by_their_whole_names(tmp_path):
    """Other classes have other attention: LlamaBidirectionalModel, say."""
    folder = pooling_checkpoints.embedding(tmp_path / "m", rows=None, variant="llama")
    config = read_config(folder)
    build_spec(config)
    for name in ("LlamaBidirectionalModel", "Qwen3Model", "LlamaForTokenClassification"):
        with pytest.raises(ConfigError, match=f"architectures {name} is not served"):
            build_spec({**config, "architectures": [name]})


def edited(folder, **changes):
    checkpoints.edit_json(folder / "config.json", lambda c: c.update(changes))


def refused(folder, message, task="auto"):
    with pytest.raises(ConfigError, match=message):
        read(folder, task)


def test_what_is_not_served_is_refused_with_the_reason(tmp_path, causal):
    three = pooling_checkpoints.classifier(tmp_path / "three", labels=3)
    refused(three, "the head has 3 labels; rerankers with one label are served")
    refused(three, "has no head for tokens, so it cannot generate. Leave out --task generate", "generate")
    refused(three, "made to score. Leave out --task embed", "embed")
    bare = pooling_checkpoints.embedding(tmp_path / "bare", rows=None)
    refused(bare, "has no head for tokens", "generate")
    refused(bare, "has no head, so it cannot score", "score")
    llama = checkpoints.write(tmp_path / "llama", "llama")
    refused(llama, 'Add to config.json, for example, "classifier_from_token"', "score")
    byte_level().save(str(causal / "tokenizer.json"))
    refused(causal, "the tokenizer has no token 'no'", "score")
    edited(bare, use_bidirectional_attention=True)
    refused(bare, "only models with causal attention are served")


@pytest.mark.parametrize("value", [None, 5, "Qwen3Model", {}, [5], []])
def test_fields_that_the_family_refuses_are_left_to_it(causal, value):
    edited(causal, architectures=value)
    checkpoints.edit_json(causal / "config.json", lambda c: c.pop("hidden_size"))
    assert read(causal) is None
    assert read(causal, "embed").width == 0
    with pytest.raises(ConfigError, match="architectures|hidden_size"):
        build_spec(read_config(causal))


def test_modules_that_are_not_served_are_named(tmp_path):
    folder = pooling_checkpoints.embedding(tmp_path / "m")
    file = folder / "1_Pooling" / "config.json"
    for change, message in (
        ({"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": False}, "pooling_mode_max_tokens is not served"),
        ({"pooling_mode_mean_tokens": True}, "pooling_mode_mean_tokens with pooling_mode_lasttoken"),
        ({"pooling_mode_lasttoken": False}, "the pooling none is not served"),
        ({"include_prompt": False}, "include_prompt is false"),
    ):
        before = file.read_text()
        checkpoints.edit_json(file, lambda c, d=change: c.update(d))
        refused(folder, message)
        file.write_text(before)
    modules = folder / "modules.json"
    before = modules.read_text()
    for text, message in (
        ('[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]', "a module of type 'Dense'"),
        ('[{"path": "../x", "type": "sentence_transformers.models.Pooling"}]', "not a plain folder name"),
        ("{}", "expected a list of modules"),
        ("[", "cannot be read"),
    ):
        modules.write_text(text)
        refused(folder, message)
    modules.write_text(before)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    refused(folder, "do_lower_case is not served")
    (folder / "sentence_bert_config.json").unlink()
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {}, "default_prompt_name": "query"}')
    refused(folder, "default_prompt_name is 'query', which is none of the prompts")


def test_the_configs_of_modules_are_fetched_and_copied(tmp_path):
    def fetched(name):
        return any(fnmatch.fnmatch(name, p) for p in WANTED) and not any(fnmatch.fnmatch(name, p) for p in UNWANTED)

    for name in (
        "modules.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "1_LogitScore/config.json",
    ):
        assert fetched(name), name
    for name in ("onnx/config.json", "original/model.safetensors", "1_Pooling/code.py", "1_Pooling/model.bin"):
        assert not fetched(name), name
    folder = pooling_checkpoints.embedding(tmp_path / "m", prompts={"query": "Q:"})
    (tmp_path / "copy").mkdir()
    copy_rest(folder, tmp_path / "copy")
    copied = {str(f.relative_to(tmp_path / "copy")) for f in (tmp_path / "copy").rglob("*") if f.is_file()}
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"} <= copied
    assert "config.json" not in copied


def test_random_weights_of_a_reranker(tmp_path):
    """The shape alone, to measure speed."""
    folder = pooling_checkpoints.classifier(tmp_path / "m")
    model = load_model(
        folder, read_config(folder), device="cpu", dtype=torch.float32, load_format="dummy", pooling=read(folder)
    )
    assert model.labels_LE.shape == (1, 32) and model.labels_LE.abs().max() > 0
