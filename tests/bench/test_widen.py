"""The study ``widen_checkpoint``: a small model in a corner of a large one answers as the small one does."""

import json

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.models.fill import read_tensor
from kvasir.models.loader import read_headers
from kvasir.speculation import heads
from kvasir.speculation.heads import fingerprint
from kvasir_lab import export
from kvasir_lab.drafters import mask_rows, prompt_rows
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.gated_adapter import GatedAdapter
from kvasir_lab.model import Model, Shape
from kvasir_lab.studies import widen_checkpoint as tool
from kvasir_lab.studies import widen_head, widen_idlm
from kvasir_lab.tokenizer import shipped_tokenizer
from tests import checkpoints

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


@torch.no_grad()
def test_spread_layers_answer_the_same_and_exits_cost_their_share(folders, tmp_path):
    tool.widen(folders[0], tmp_path / "wide", SIZE, spread=True)
    torch.testing.assert_close(logits(tmp_path / "wide"), logits(folders[1]), rtol=1e-3, atol=1e-2)
    reference = checkpoints.reference
    small = reference(folders[0])(IDS, output_hidden_states=True).hidden_states
    wide = reference(tmp_path / "wide")(IDS, output_hidden_states=True).hidden_states
    # Three layers in five: the first is over after 1 of 5, the second after 3.
    for layers, of_small in ((1, 1), (3, 2)):
        torch.testing.assert_close(wide[layers][..., :32], small[of_small], rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_a_widened_mask_adapter_drafts_what_the_small_one_does(tmp_path):
    small = Model(Shape(vocab=2048, dim=32, layers=3, ffn=48, heads=6, kv_heads=3, head_dim=16, positions=64), 1)
    small.model.embed_tokens.weight.mul_(12)
    export.export(small, shipped_tokenizer(), tmp_path / "small", torch.float32)
    adapter = GatedAdapter(small, 4, 8.0)
    for i, b in enumerate(adapter.b):
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    facts = {"name": "small", "hidden_size": 32, "vocab_size": 2048, "num_layers": 3, "weights": "x"}
    adapter.write(tmp_path / "adapter", facts, 4)
    tool.widen(tmp_path / "small", tmp_path / "wide", SIZE)
    widen_idlm.widen(tmp_path / "adapter", tmp_path / "small", tmp_path / "wide-adapter", SIZE)
    told = json.loads((tmp_path / "wide-adapter" / "config.json").read_text())["target"]
    large = export.load(tmp_path / "wide")
    assert (told["hidden_size"], told["num_layers"]) == (80, 5) and told["weights"] == fingerprint(
        large.model.norm.weight
    )
    batch = Batch(torch.arange(10, 30)[None], torch.tensor([20]), torch.tensor([4]), None)
    rows = mask_rows.layout(batch, 3, torch.tensor([1]), torch.device("cpu"))

    def drafted(model, folder):
        read = GatedAdapter.read(folder, model)
        text = prompt_rows.read(model, batch.ids)[1]
        normed = mask_rows.run(model, read.mask_E, rows, text, read.product)
        return normed @ model.model.embed_tokens.weight.t()

    wanted = drafted(small, tmp_path / "adapter")
    found = drafted(large, tmp_path / "wide-adapter")
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=5e-3 * float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("kind", widen_head.KINDS)
def test_a_widened_head_is_the_small_one_and_zeros(kind, tmp_path):
    """Packaged heads read the same from a widened state, and are known as trained for the widened weights."""
    config = json.loads((resolve("base") / "config.json").read_text())
    size = tool.Size(512, 10, config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"])
    widen_head.widen(kind, "", resolve("base"), tmp_path / kind, size)
    (small, _), (large, told) = heads.read(kind, heads.folder_of(kind, "")), heads.read(kind, tmp_path / kind)
    assert (told["hidden_size"], told["num_layers"]) == (512, 10)
    tool.widen(resolve("base"), tmp_path / "wide", size, spread=True)
    norm = {s.name: read_tensor(s) for s in read_headers(tmp_path / "wide")}["model.norm.weight"]
    assert told["weights"] == heads.fingerprint(norm)
    own = small.shape.dim
    if kind == "medusa":
        assert large.shape.layers == (9,)
        state = torch.randn(3, own, generator=torch.Generator().manual_seed(1))
        found = large(torch.nn.functional.pad(state, (0, 512 - own)))
        torch.testing.assert_close(found[..., :own], small(state))
        assert not found[..., own:].any()
    else:
        torch.testing.assert_close(large.weight[..., :own], small.weight)
        assert not large.weight[..., own:].any()
    with pytest.raises(ConfigError, match="these can: medusa, ppd"):
        widen_head.widen("eagle", "", resolve("base"), tmp_path / "eagle", size)
