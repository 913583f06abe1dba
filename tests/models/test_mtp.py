"""MTP layers: parity with transformers' layers for every family that publishes one, and what loading refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir import technique
from kvasir.cli.show import describe
from kvasir.engine.ways.batch import pack
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.families import FAMILIES, find_family
from kvasir.models.loader import load_model
from kvasir.types import Span
from tests import checkpoints, mtp_checkpoints, quantised
from tests.models.test_parity import PAGE_SLOTS, TOLERANCE, Paged, prompts


class Drafting(Paged):
    """A model with its MTP layer, over poisoned pages."""

    def __init__(self, folder, **options):
        super().__init__(folder, mtp=True, **options)
        self.mtp = self.model.mtp
        self.cache = self.pool.layer(self.mtp.index)

    def hidden(self, seq):
        """The model's states behind its final norm, of all rows of a sequence."""
        count, last = len(seq.tokens), len(self.model.blocks) - 1
        taps = {last: torch.empty(count, self.model.spec.hidden_size)}
        self.step([Span(seq, 0, count)], taps)
        return self.model.norm(taps[last])

    def batch(self, seq, start, length):
        span = Span(seq, start, length)
        for g in self.states:
            span = replace(span, states=tuple(seq.tables[g][:2]))
        batch = pack([span], PAGE_SLOTS, "cpu", len(self.pool.groups), self.states)
        self.backend.plan(batch)
        return batch

    @torch.inference_mode()
    def rows(self, seq, hidden, start, length, keep=False):
        """Logits of rows, or only their keys and values."""
        ids = torch.tensor(seq.tokens[start + 1 : start + length + 1])
        x = self.mtp.enter(self.mtp.embed(self.model, ids), hidden[start : start + length])
        batch = self.batch(seq, start, length)
        if keep:
            return self.mtp.keep(x, self.cache, self.backend, batch)
        return self.mtp.logits(self.model, self.mtp.forward(x, self.cache, self.backend, batch))


@pytest.mark.parametrize("variant", mtp_checkpoints.LAYOUTS)
def test_logits_are_those_of_transformers(variant, tmp_path):
    reference = mtp_checkpoints.write(tmp_path, variant)
    near = next((t for family, t in TOLERANCE.items() if variant.startswith(family)), 1e-4)
    ids = prompts()[0]
    states = reference.hidden(ids)
    want = reference.logits(reference.states(states[:-1], ids[1:]))
    drafting = Drafting(tmp_path)
    seq = drafting.seqs[0]
    hidden, count = drafting.hidden(seq), len(ids) - 1
    torch.testing.assert_close(drafting.rows(seq, hidden, 0, count), want, atol=near, rtol=near)
    # Keys of earlier rows alone, in pieces, and then a single row.
    for group, _ in enumerate(drafting.pool.groups):
        drafting.pool.poison(group, list(range(1, 40)))
    for start in range(0, count - 1, 7):
        drafting.rows(seq, hidden, start, min(7, count - 1 - start), keep=True)
    torch.testing.assert_close(drafting.rows(seq, hidden, count - 1, 1), want[-1:], atol=near, rtol=near)
    # Negative controls: the token of the row itself, a row that is not there, and the state before the final norm.
    with torch.inference_mode():
        wrong = drafting.mtp.enter(drafting.mtp.embed(drafting.model, torch.tensor(ids[:-1])), hidden[:-1])
        batch = drafting.batch(seq, 0, count)
        other = drafting.mtp.logits(
            drafting.model, drafting.mtp.forward(wrong, drafting.cache, drafting.backend, batch)
        )
    assert (other - want).abs().max() > 0.1


def test_plain_serving_loads_nothing_of_it(tmp_path):
    mtp_checkpoints.write(tmp_path, "deepseek_v3", copies=True)
    config = checkpoint.read_config(tmp_path)
    model = load_model(tmp_path, config, device="cpu", dtype=torch.float32)
    assert model.mtp is None and not any(name.startswith(("mtp.", "layers.3.")) for name in model.slots())
    assert all(3 not in group.layers for group in model.spec.cache_groups())


def test_equal_copies_are_shared_and_others_are_read(tmp_path):
    def load(folder, edit=None):
        mtp_checkpoints.write(folder, "deepseek_v3", edit, copies=True)
        config = checkpoint.read_config(folder)
        return load_model(folder, config, device="cpu", dtype=torch.float32, mtp=True)

    shared = load(tmp_path / "same")
    assert shared.mtp.embed_VE is None and shared.mtp.head is None

    def other(tensors):
        for part in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.3.{part}.weight"] += 1

    own = load(tmp_path / "other", other)
    assert torch.equal(own.mtp.embed_VE, own.embed_VE + 1)
    assert torch.equal(own.mtp.head.dequantise(), own.head.dequantise() + 1)


def load(folder):
    return load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32, mtp=True)


def test_a_missing_tensor_is_named(tmp_path):
    mtp_checkpoints.write(tmp_path, "qwen3_next", lambda tensors: tensors.pop("mtp.pre_fc_norm_hidden.weight"))
    with pytest.raises(ConfigError, match=r"missing tensors: mtp.pre_fc_norm_hidden.weight.*leave out --drafter mtp"):
        load(tmp_path)


def test_a_tensor_that_the_layer_does_not_know_is_refused(tmp_path):
    def more(tensors):
        tensors["model.layers.3.self_attn.sinks"] = torch.zeros(4)

    mtp_checkpoints.write(tmp_path, "deepseek_v3", more)
    with pytest.raises(ConfigError, match=r"unexpected tensors: model.layers.3.self_attn.sinks"):
        load(tmp_path)


def test_a_config_one_layer_too_short_is_refused(tmp_path):
    mtp_checkpoints.write(tmp_path, "deepseek_v3")
    mtp_checkpoints.layers_in_config(tmp_path, 2)
    with pytest.raises(ConfigError, match="model.layers.2.eh_proj.weight.*Set num_hidden_layers to 3"):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_plain_serving_takes_no_layer_of_the_model_for_it(variant, tmp_path):
    """A config one layer too short would leave out the last layer, if a name were all that tells an MTP layer."""
    changes = dict(mlp_layer_types=["dense", "sparse", "dense", "sparse"]) if variant == "glm4_moe_lite" else {}
    checkpoints.write(tmp_path, variant, num_hidden_layers=4, **changes)
    config = checkpoint.read_config(tmp_path) | {"num_hidden_layers": 3}
    config |= {name: kinds[:3] for name, kinds in config.items() if name.endswith("layer_types") and kinds}
    with pytest.raises(ConfigError, match=r"unexpected tensors: model.layers.3\."):
        load_model(tmp_path, config, device="cpu", dtype=torch.float32)


def test_a_checkpoint_without_the_layer_and_a_family_without_one_are_refused(tmp_path):
    checkpoints.write(tmp_path / "a", "qwen3_5_text")
    with pytest.raises(ConfigError, match=r"stores no MTP layer \(tensor 'mtp.fc.weight' is missing\)"):
        load(tmp_path / "a")
    checkpoints.write(tmp_path / "b", "llama")
    with pytest.raises(ConfigError, match="family llama"):
        load(tmp_path / "b")


def test_random_weights_have_the_layer(tmp_path):
    mtp_checkpoints.write(tmp_path, "qwen3_next")
    config = checkpoint.read_config(tmp_path)
    model = load_model(tmp_path, config, device="cpu", dtype=torch.float32, load_format="dummy", mtp=True)
    assert all(slot.target.isfinite().all() for name, slot in model.slots().items() if name.startswith("mtp."))


def test_a_second_layer_is_left_out(tmp_path):
    """A checkpoint with several of them: the first one is used several times."""
    mtp_checkpoints.write(tmp_path, "qwen3_next")
    tensors = load_file(tmp_path / "model.safetensors")
    more = {n.replace("mtp.layers.0.", "mtp.layers.1."): t.clone() for n, t in tensors.items() if "mtp.layers" in n}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).mtp is not None


def test_a_quantised_layer_stays_as_it_is_stored(tmp_path):
    """The product that joins both inputs, too, where the checkpoint has it quantised."""
    mtp_checkpoints.write(tmp_path / "source", "glm4_moe")
    quantised.write(tmp_path / "source", tmp_path, "compressed-channel")
    made, plain = Drafting(tmp_path / "made"), Drafting(tmp_path / "plain")
    layer = made.mtp
    formats = {weight.format.name for weight in (layer.proj.weight, layer.block.mixer.qkv.weight, layer.block.ffn.down)}
    assert formats == {"f8"} and plain.mtp.proj.weight.format.name == "plain"
    seq = made.seqs[0]
    hidden, count = plain.hidden(plain.seqs[0]), len(seq.tokens) - 1
    want = plain.rows(plain.seqs[0], hidden, 0, count)
    torch.testing.assert_close(made.rows(seq, hidden, 0, count), want, atol=1e-4, rtol=1e-4)


def test_show_names_what_a_checkpoint_brings(tmp_path):
    mtp_checkpoints.write(tmp_path / "with", "deepseek_v3")
    checkpoints.write(tmp_path / "without", "deepseek_v3")
    lines = {name: describe(str(tmp_path / name), None, 8)["layers"] for name in ("with", "without")}
    assert lines["with"][:-1] == lines["without"] and "MTP, for --drafter mtp" in lines["with"][-1]
    assert lines["with"][-1].startswith("3: 4 heads over a latent")


def test_the_page_has_a_row_for_every_family():
    page = (Path(__file__).parents[2] / "docs" / "methods" / "speculation" / "mtp.md").read_text()
    for name in technique.own(FAMILIES):
        assert (f"`{name}`" in page) == hasattr(find_family(name), "MTP"), name
