"""Planted mistakes that the comparison with transformers must see. A comparison that they pass compares nothing."""

from dataclasses import replace

import pytest
import torch

from kvasir.attention.latent import UpProjection
from kvasir.kernels import gated_delta
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.layer_embedding import LayerEmbeddings
from kvasir.layers.mixers.gqa import Mixer
from kvasir.layers.spec import RopeSpec
from kvasir.models.decoder import Block
from kvasir.models.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma4_text,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    ministral3,
    mistral4,
    mixtral,
    phi3,
    qwen3_next,
    smollm3,
)
from kvasir.models.stored import View
from tests import checkpoints
from tests.models.test_parity import assert_parity


def transposed(monkeypatch):
    """Experts as wide as the model, read as they lie."""
    real = gpt_oss.stored

    def wrong(slot, spec):
        found = real(slot, spec)
        return View(found.name, found.index) if "down.weight" in slot else found

    monkeypatch.setattr(gpt_oss, "stored", wrong)


def exchanged(family):
    def plant(monkeypatch):
        real = family.stored
        swap = {"gate": "up", "up": "gate"}

        def wrong(slot, spec):
            parts = [swap.get(part, part) if ".ffn." in slot else part for part in slot.split(".")]
            return real(".".join(parts), spec)

        monkeypatch.setattr(family, "stored", wrong)

    return plant


def no_sinks(monkeypatch):
    real = Mixer.forward

    def wrong(self, *arguments, **options):
        if self.sinks_H is not None:
            self.sinks_H.fill_(-1e9)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Mixer, "forward", wrong)


def whole_heads(monkeypatch):
    """Frequencies of a partly rotated head taken from the whole head."""
    real = RopeSpec.__init__

    def wrong(self, theta, head_dim, *rest, **options):
        real(self, theta**0.75, head_dim, *rest, **options)

    monkeypatch.setattr(RopeSpec, "__init__", wrong)


def corrected_weights(monkeypatch):
    """The correction of the choice, added to the weights."""
    real = FFN.route

    def wrong(self, x_TE):
        weights_TK, ids_TK = real(self, x_TE)
        return weights_TK + self.correction_X[ids_TK], ids_TK

    monkeypatch.setattr(FFN, "route", wrong)


def unscaled(monkeypatch):
    real = Block.forward

    def wrong(self, *arguments, **options):
        self.scale_1.fill_(1.0)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Block, "forward", wrong)


def shifted(monkeypatch):
    real = LayerEmbeddings.__call__
    monkeypatch.setattr(LayerEmbeddings, "__call__", lambda self, *rest: real(self, *rest).roll(1, 1))


def respecified(family, change):
    """A family that reads its config wrong: ``change`` makes the wrong layer of the right one."""

    def plant(monkeypatch):
        real = family.build

        def wrong(fields):
            spec = real(fields)
            return replace(spec, layers=tuple(change(layer, spec.layers[0]) for layer in spec.layers))

        monkeypatch.setattr(family, "build", wrong)

    return plant


def last_elements(monkeypatch):
    """Values taken from the last elements of a cached row."""
    real = PlainCodec.read

    def wrong(self, cache, pages, shared=None):
        k, _ = real(self, cache, pages, shared)
        turned = k.roll(cache.latent, -1)  # what the reference takes as the value is the end of the row
        return turned, turned[..., : cache.latent]

    monkeypatch.setattr(PlainCodec, "read", wrong)
    monkeypatch.setattr(UpProjection, "absorb", _rolled(UpProjection.absorb))


def _rolled(real):
    """Queries in the order of the turned rows, so that scores stay right and only values are wrong."""
    return lambda self, q_THD: real(self, q_THD).roll(self.rank, -1)


def swapped_gates(monkeypatch):
    real = qwen3_next.stored

    def wrong(slot, spec):
        swap = {"mixer.b": "mixer.a", "mixer.a": "mixer.b"}
        other = next((slot.replace(old, new) for old, new in swap.items() if f".{old}." in slot), slot)
        return real(other, spec)

    monkeypatch.setattr(qwen3_next, "stored", wrong)


def untouched_tail(monkeypatch):
    """The convolution of a span sees nothing of the rows before it."""
    real = gated_delta.inputs
    monkeypatch.setattr(gated_delta, "inputs", lambda rows, tail, *rest: real(rows, tail * 0, *rest))


MISTAKES = {
    "interleaved pairs rotate as halves": (
        "deepseek_v3",
        respecified(deepseek_v3, lambda layer, _: replace(layer, mixer=replace(layer.mixer, interleaved=False))),
    ),
    "halves rotate as interleaved pairs": (
        "glm4_moe_lite_yarn",
        respecified(glm4_moe_lite, lambda layer, _: replace(layer, mixer=replace(layer.mixer, interleaved=True))),
    ),
    "scores are scaled by the part without RoPE": (
        "deepseek_v2_lite",
        respecified(
            deepseek_v2,
            lambda layer, _: replace(layer, mixer=replace(layer.mixer, scale=layer.mixer.nope_dim**-0.5)),
        ),
    ),
    "yarn's factor is missing in the scale": (
        "deepseek_v2",
        respecified(
            deepseek_v2, lambda layer, _: replace(layer, mixer=replace(layer.mixer, scale=layer.mixer.qk_dim**-0.5))
        ),
    ),
    "latent queries are not scaled by their position": (
        "mistral4",
        respecified(mistral4, lambda layer, _: replace(layer, mixer=replace(layer.mixer, query_scale=None))),
    ),
    "groups are scored by their two best experts": (
        "deepseek_v2",
        respecified(
            deepseek_v2,
            lambda layer, _: (
                replace(layer, ffn=replace(layer.ffn, group_best=2)) if hasattr(layer.ffn, "group_best") else layer
            ),
        ),
    ),
    "values are the last elements of a latent row": ("deepseek_v3_dense", last_elements),
    "gates of a head are exchanged": ("qwen3_next", swapped_gates),
    "a span's convolution starts anew": ("qwen3_5_text", untouched_tail),
    "the correction is added to the weights": ("glm4_moe", corrected_weights),
    "all experts are in one group": (
        "glm4_moe_groups",
        respecified(glm4_moe, lambda layer, _: replace(layer, ffn=replace(layer.ffn, groups=1, top_groups=1))),
    ),
    "w1 and w3 are exchanged": ("mixtral", exchanged(mixtral)),
    "what sublayers add is not scaled": (
        "granite",
        respecified(granite, lambda layer, _: replace(layer, residual_scale=1.0)),
    ),
    "a layer reads the first cache of its kind and not the last": (
        "gemma4_text",
        respecified(
            gemma4_text, lambda layer, _: replace(layer, cache_of=0 if layer.cache_of == 2 else layer.cache_of)
        ),
    ),
    "values are not normalised": (
        "gemma4_text_plain",
        respecified(gemma4_text, lambda layer, _: replace(layer, mixer=replace(layer.mixer, value_norm=None))),
    ),
    "all pairs of a head rotate": (
        "gemma4_text",
        respecified(gemma4_text, lambda layer, _: replace(layer, rope=replace(layer.rope, kind="default"))),
    ),
    "the factor after a layer is left out": ("gemma4_text_moe", unscaled),
    "gate and up of experts in one tensor are exchanged": ("gemma4_text_moe", exchanged(gemma4_text)),
    "layers get the embeddings of the layer before": ("gemma4_text_plain", shifted),
    "layers without RoPE rotate": (
        "smollm3",
        respecified(smollm3, lambda layer, first: replace(layer, rope=first.rope)),
    ),
    "scores are not capped": (
        "gemma2_caps",
        respecified(gemma2, lambda layer, _: replace(layer, mixer=replace(layer.mixer, softcap=None))),
    ),
    "queries are not scaled by their position": (
        "ministral3",
        respecified(ministral3, lambda layer, _: replace(layer, mixer=replace(layer.mixer, query_scale=None))),
    ),
    "experts are read transposed": ("gpt_oss_plain", transposed),
    "gate and up of experts are exchanged": ("gpt_oss", exchanged(gpt_oss)),
    "gate and up of a fused tensor are exchanged": ("phi3", exchanged(phi3)),
    "sinks are left out": ("gpt_oss", no_sinks),
    "a partly rotated head has the frequencies of a whole one": ("phi3_partial", whole_heads),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees(mistake, tmp_path, monkeypatch):
    variant, plant = MISTAKES[mistake]
    folder = checkpoints.write(tmp_path, variant)
    plant(monkeypatch)
    with torch.inference_mode(), pytest.raises(AssertionError, match="not close"):
        assert_parity(folder)
