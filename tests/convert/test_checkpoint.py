"""Streamed checkpoints: tensors arrive as stored, shards are complete, and a failure leaves nothing behind."""

from __future__ import annotations

import json
import tempfile

import pytest
import torch

from kvasir.convert.checkpoint import RECORD, convert, plain_folder, read_tensors, write_tensors
from kvasir.convert.converter import Converter, Source, load_converter
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.loader import INDEX, load_model, read_headers
from kvasir.models.packed import SUFFIX
from tests.checkpoints import reference, write


class Copy(Converter):
    exact = True

    def tensors(self, source, tensors):
        yield from tensors


class Break(Converter):
    """A converter that fails, or does worse, after the first tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def tensors(self, source, tensors):
        for i, (name, tensor) in enumerate(tensors):
            if i == 3:
                if self.how == "raise":
                    raise OSError(28, "No space left on device")
                if self.how == "drop":
                    continue
                tensor = tensor[..., :-1]
            yield name, tensor


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("limit", [20_000, 1 << 30])
def test_a_copy_is_equal_and_loads(shards, limit, tmp_path):
    source = write(tmp_path / "source", "qwen3", shards=shards)
    record = convert(Copy(), "copy", source, tmp_path / "deep" / "copy", shard_bytes=limit)
    copy = tmp_path / "deep" / "copy"
    before, after = dict(read_tensors(source)), dict(read_tensors(copy))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert (
        record
        == json.loads((copy / RECORD).read_text())
        == {"converter": "copy", "exact": True, "source": "source", "bytes": sum(t.nbytes for t in before.values())}
    )
    files = {t.file for t in read_headers(copy)}
    assert (len(files) > 1) == (limit == 20_000) == (copy / INDEX).exists()
    assert all(f.stat().st_size < 30_000 for f in files if limit == 20_000)
    load_model(copy, checkpoint.read_config(copy), device="cpu", dtype=torch.float32)
    assert reference(copy).num_parameters() == reference(source).num_parameters()
    assert not [p for p in (tmp_path / "deep").iterdir() if p.name != "copy"]


def test_the_rest_of_the_folder_comes_along(tmp_path):
    convert(Copy(), "copy", checkpoint.resolve("nano"), tmp_path / "copy")
    names = {p.name for p in (tmp_path / "copy").iterdir()}
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
    } <= names
    assert not names & {"README.md", "training.json"}, "the source's card is not the copy's"


@pytest.mark.parametrize("how,error", [("raise", ConfigError), ("drop", ConfigError), ("cut", ConfigError)])
def test_a_failure_leaves_nothing_behind(how, error, tmp_path):
    source = write(tmp_path / "source", "llama")
    with pytest.raises(error):
        convert(Break(how), how, source, tmp_path / "copy")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_targets_that_are_taken(tmp_path):
    source = write(tmp_path / "source", "llama")
    (tmp_path / "empty").mkdir()
    convert(Copy(), "copy", source, tmp_path / "empty")
    for taken in ("empty", "file"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigError, match="exists already"):
            convert(Copy(), "copy", source, tmp_path / taken)
    with pytest.raises(ConfigError, match="cannot write"):
        convert(Copy(), "copy", source, tmp_path / "file" / "below")


def test_bad_sources(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no config.json"):
        convert(Copy(), "copy", tmp_path / "none", tmp_path / "copy")
    source = write(tmp_path / "source", "llama")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="truncated"):
        convert(Copy(), "copy", source, tmp_path / "copy")


def test_a_tensor_given_twice_is_our_bug(tmp_path):
    with pytest.raises(AssertionError, match="twice"):
        write_tensors(tmp_path, iter([("a", torch.ones(2)), ("a", torch.ones(2))]))


def test_stored_names_follow_the_family(tmp_path):
    source = write(tmp_path / "source", "qwen3_moe")
    about = Source.of(source, checkpoint.read_config(source))
    assert (
        about.stored("layers.1.mixer.q.weight")
        == "model.layers.1.self_attn.q_proj.weight"
        in dict(read_tensors(source))
    )


def test_a_multimodal_checkpoint_keeps_its_parts(tmp_path):
    """Its config and the tensors that are left out are copied, and a slot has the checkpoint's own name."""
    source = write(tmp_path / "source", "gemma3")
    convert(Copy(), "copy", source, tmp_path / "copy")
    config = json.loads((source / "config.json").read_text())
    assert config["vision_config"] and config == json.loads((tmp_path / "copy" / "config.json").read_text())
    before, after = dict(read_tensors(source)), dict(read_tensors(tmp_path / "copy"))
    assert before.keys() == after.keys() and any("vision_tower" in name for name in after)
    about = Source.of(source, checkpoint.read_json(source / "config.json"))
    assert about.stored("layers.1.mixer.q.weight") in before


def test_a_part_of_a_tensor_has_no_name_of_its_own(tmp_path):
    source = write(tmp_path / "source", "phi3")
    about = Source.of(source, checkpoint.read_config(source))
    assert about.stored("layers.1.mixer.o.weight") == "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(ConfigError, match="'layers.1.mixer.q.weight' is a part of .*qkv_proj"):
        about.stored("layers.1.mixer.q.weight")


def test_the_command(tmp_path, capsys):
    from kvasir.cli import convert as command

    command.run("outlier_twin:keys=4", "nano", tmp_path / "twin")
    assert "the same function as nano" in capsys.readouterr().out
    assert load_converter("outlier-twin:keys=4").config.keys == 4
    assert json.loads((tmp_path / "twin" / RECORD).read_text())["converter"] == "outlier_twin:keys=4"


def test_pack_and_unpack(tmp_path):
    """Packed shards hold the same bits, and the unpacked folder loads in transformers."""
    source = write(tmp_path / "source", "qwen3", shards=True)
    pack = load_converter("pack:shard_mib=1")
    assert load_converter("pack").shard_bytes == 4 << 30 and pack.shard_bytes == 1 << 20
    convert(pack, "pack", source, tmp_path / "packed", shard_bytes=20_000)
    convert(load_converter("unpack"), "unpack", tmp_path / "packed", tmp_path / "plain")
    before, packed, plain = (dict(read_tensors(f)) for f in (source, tmp_path / "packed", tmp_path / "plain"))
    assert before.keys() == packed.keys() == plain.keys()
    assert all(torch.equal(before[n], packed[n]) and torch.equal(before[n], plain[n]) for n in before)
    files = {t.file for t in read_headers(tmp_path / "packed")}
    assert len(files) > 1 and all(f.name.endswith(".safetensors" + SUFFIX) for f in files)
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert reference(tmp_path / "plain").num_parameters() == reference(source).num_parameters()
    with pytest.raises(ConfigError, match="shard_mib=0 must be at least 1"):
        load_converter("pack:shard_mib=0")


def test_the_plain_folder_of_a_packed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    source = write(tmp_path / "source", "qwen3")
    assert plain_folder(source) == source
    packed = tmp_path / "packed"
    convert(load_converter("pack"), "pack", source, packed)
    plain = plain_folder(packed)
    assert {f.name for f in plain.iterdir()} == {"model.safetensors", "config.json", "generation_config.json", RECORD}
    want, found = dict(read_tensors(source)), dict(read_tensors(plain))
    assert want.keys() == found.keys() and all(torch.equal(want[n], found[n]) for n in want)
    assert plain_folder(packed) == plain and len(list((tmp_path / "temporary").iterdir())) == 1, "made once"
    (packed / "config.json").write_text(json.dumps(checkpoint.read_config(packed) | {"eos_token_id": 7}))
    assert checkpoint.read_config(plain_folder(packed))["eos_token_id"] == 7, "another state, another copy"
