"""``tools/widen_checkpoint.py``: a small model in a corner of a large one answers as the small one does."""

import json

import pytest
import torch

from kvasir.errors import ConfigError
from tests import checkpoints
from tools import widen_checkpoint as tool

# Groups of 4 query heads; the small model's have 2.
SIZE = tool.Size(hidden=80, layers=5, ffn=96, heads=12, kv_heads=3)
IDS = torch.tensor([[5, 17, 3, 88, 41, 41, 9, 2, 60, 13, 77, 30]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("widen")
    small = root / "small"
    checkpoints.write(small, "qwen3", tie_word_embeddings=True)
    tool.widen(small, root / "wide", SIZE)
    return small, root / "wide"


def logits(folder):
    return checkpoints.reference(folder)(IDS).logits


@torch.no_grad()
def test_answers_as_the_small_model(folders):
    small, wide = map(logits, folders)
    torch.testing.assert_close(wide, small, rtol=1e-3, atol=2e-3 * float(small.abs().max()))
    assert json.loads((folders[1] / "config.json").read_text())["num_hidden_layers"] == SIZE.layers


@torch.no_grad()
def test_norms_that_are_not_made_up_for_answer_otherwise(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.math, "sqrt", lambda share: 1.0)
    tool.widen(folders[0], tmp_path / "wide", SIZE)
    small, wide = logits(folders[0]), logits(tmp_path / "wide")
    assert float((wide - small).abs().max()) > 0.05 * float(small.abs().max())


def test_idle_layers_are_links(folders, tmp_path):
    tool.widen(folders[0], tmp_path / "next", SIZE, like=folders[1])
    links = sorted(file.name for file in (tmp_path / "next").iterdir() if file.is_symlink())
    assert links == ["layer-03.safetensors", "layer-04.safetensors"]
    assert torch.equal(logits(tmp_path / "next"), logits(folders[1]))


def test_refuses_what_does_not_fit(folders, tmp_path):
    with pytest.raises(ConfigError, match="is no part of"):
        tool.widen(folders[0], tmp_path, tool.Size(hidden=16, layers=5, ffn=96, heads=12, kv_heads=3))
    config = json.loads((folders[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match="tied embeddings"):
        tool.wider_config(config | {"tie_word_embeddings": False}, SIZE)
