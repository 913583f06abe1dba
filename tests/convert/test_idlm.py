"""Released I-DLM checkpoints become Qwen3 folders of the same tensors, with the mask's id and the stride."""

from __future__ import annotations

import json

import pytest
import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.checkpoint import SIDECAR
from kvasir.models.loader import load_model, read_tensors
from tests.checkpoints import VOCAB, edit_json, write


@pytest.fixture
def released(tmp_path):
    """Return a folder as I-DLM models are published."""
    folder = write(tmp_path / "released", "qwen3")
    edit_json(
        folder / "config.json",
        lambda config: config.update(
            model_type="sdar",
            architectures=["SDARForCausalLM"],
            auto_map={"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
            block_size=3,
            mask_token_id=90,
            fuse_cross_entropy=True,
        ),
    )
    (folder / "modeling_sdar.py").write_text("raise RuntimeError('code of a checkpoint never runs')\n")
    return folder


def test_the_tensors_stay_and_the_config_says_qwen3(released, tmp_path):
    new = tmp_path / "new"
    record = convert(load_converter("idlm"), "idlm", released, new)
    assert record["exact"] and json.loads((new / SIDECAR).read_text()) == {
        "kind": "idlm",
        "mask_token_id": 90,
        "stride": 4,
    }
    before, after = dict(read_tensors(released)), dict(read_tensors(new))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    config = json.loads((new / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["architectures"] == ["Qwen3ForCausalLM"]
    assert not {"auto_map", "block_size", "mask_token_id", "fuse_cross_entropy"} & set(config)
    assert not (new / "modeling_sdar.py").exists()
    load_model(new, checkpoint.read_config(new), device="cpu", dtype=torch.float32)
    convert(load_converter("unpack"), "unpack", new, tmp_path / "again")
    assert (tmp_path / "again" / SIDECAR).read_bytes() == (new / SIDECAR).read_bytes(), "later conversions keep it"


def test_options_replace_what_the_config_says(released, tmp_path):
    convert(load_converter("idlm:stride=3,mask_token_id=5"), "idlm", released, tmp_path / "new")
    assert json.loads((tmp_path / "new" / SIDECAR).read_text()) == {"kind": "idlm", "mask_token_id": 5, "stride": 3}


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model_type": "llama"}, "idlm converts 'sdar'"),
        ({"use_regular_causal": False}, "no I-DLM"),
        ({"mask_token_id": None}, "idlm:mask_token_id=ID"),
        ({"mask_token_id": VOCAB}, f"below vocab_size {VOCAB}"),
        ({"block_size": None}, "idlm:stride=4"),
        ({"block_size": True}, "idlm:stride=4"),
    ],
)
def test_what_is_no_idlm_is_refused_with_the_fix(change, error, released, tmp_path):
    edit_json(released / "config.json", lambda config: config.update(change))
    with pytest.raises(ConfigError, match=error):
        convert(load_converter("idlm"), "idlm", released, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="from 2 to 16"):
        load_converter("idlm:stride=1")


def test_serving_the_released_layout_names_the_command(released):
    with pytest.raises(ConfigError, match="kvasir convert idlm"):
        checkpoint.read_config(released)
