"""Folders of Mamba-3 and M2RNN with random numbers: three recurrent layers and one that attends."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.families import build_spec, find_family
from kvasir.models.stored import view_of
from tests import checkpoints

OUTER = dict(
    vocab_size=checkpoints.VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-5, hidden_act="silu", eos_token_id=0,
    layer_types=["recurrent", "recurrent", "full_attention", "recurrent"],
)  # fmt: skip
CONFIGS = {
    "siso": dict(model_type="kvasir_mamba3", mamba_head_dim=8, mamba_state_dim=8, mamba_groups=2),
    "mimo": dict(
        model_type="kvasir_mamba3", mamba_head_dim=8, mamba_state_dim=12, mamba_rank=2, mamba_rope_fraction=1.0,
        mamba_rate="softplus",
    ),
    "m2rnn": dict(
        model_type="kvasir_m2rnn", rnn_num_heads=4, rnn_num_key_heads=2, rnn_key_dim=8, rnn_value_dim=4,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def write(folder, name):
    """A folder with random tensors, put together from what the family says that they hold."""
    config = OUTER | CONFIGS[name]
    config["architectures"] = list(find_family(config["model_type"]).ARCHITECTURES)
    spec, parts = build_spec(config), {}
    slots = Decoder(spec, Placement(torch.device("cpu"), torch.float32)).slots()
    generator = torch.Generator().manual_seed(0)
    for slot, place in slots.items():
        view = view_of(find_family(spec.family).stored(slot, spec))
        value = torch.randn(place.target.shape, generator=generator) * place.target.shape[-1] ** -0.5
        value = value + 1 if "norm" in slot else value
        parts.setdefault(view.name, {})[view.index[0].start if view.index else 0] = value
    tensors = {name: torch.cat([found[first] for first in sorted(found)]) for name, found in parts.items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return spec, tensors
