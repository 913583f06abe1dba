"""Tiny random checkpoints with an MTP layer, and the logits that transformers' own layers give for it.

``write(folder, variant)`` adds the layer to a checkpoint of `tests.checkpoints`. Its tensors are named as the family
publishes them. The table here was written from published checkpoints and knows nothing of our families' tables.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvasir.models.loader import read_tensors
from tests import checkpoints

# By variant: what the names of the layer begin with, and its parts that are not the decoder layer's.
BEHIND = (
    "model.layers.{n}.",
    dict(
        enorm="model.layers.{n}.enorm",
        hnorm="model.layers.{n}.hnorm",
        eh_proj="model.layers.{n}.eh_proj",
        post_norm="model.layers.{n}.shared_head.norm",
    ),
)
APART = (
    "mtp.layers.0.",
    dict(
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        eh_proj="mtp.fc",
        post_norm="mtp.norm",
    ),
)
# transformers has no MiMo: its layers are Qwen 2's, and the order of the two inputs is the other way round.
MIMO = (
    "model.mtp_layers.0.",
    dict(
        enorm="model.mtp_layers.0.token_layernorm",
        hnorm="model.mtp_layers.0.hidden_layernorm",
        eh_proj="model.mtp_layers.0.input_proj",
        post_norm="model.mtp_layers.0.final_layernorm",
    ),
)
LAYOUTS = {
    "mimo": MIMO,
    "deepseek_v3": BEHIND,
    "glm4_moe": BEHIND,
    "glm4_moe_groups": BEHIND,
    "glm4_moe_lite": BEHIND,
    "qwen3_next": APART,
    "qwen3_next_plain": APART,
    "qwen3_5_text": APART,
    "qwen3_5_text_plain": APART,
    "qwen3_5_moe_text": APART,
    "qwen3_5": APART,
    "qwen3_5_moe": APART,
}


class MTP:
    """transformers' MTP layer behind a model that was loaded from ``folder``."""

    def __init__(self, folder: Path) -> None:
        from transformers.modeling_layers import MtpLayer

        self.model = checkpoints.reference(folder)
        self.base = self.model.get_decoder()
        self.base = getattr(self.base, "language_model", self.base)
        config = copy.deepcopy(self.base.config)
        kinds = dict(layer_types=["full_attention"], mlp_layer_types=["sparse"], first_k_dense_replace=0)
        for name, value in (kinds | dict(decoder_sparse_step=1, mlp_only_layers=[], num_hidden_layers=1)).items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        self.layer = MtpLayer(config, type(self.base.layers[-1]), type(self.base.norm), 0).eval()

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        """The model's states behind its final norm [T, E]."""
        return self.base(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def states(self, hidden_TE: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """As ``forward``, without gradients."""
        return self.forward(hidden_TE, ids)

    def forward(self, hidden_TE: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """States behind the layer's last norm [T, E]. Row i joins ``hidden_TE[i]`` and ``ids[i]``, the token after."""
        positions, count = torch.arange(len(ids))[None], len(ids)
        embedded = self.model.get_input_embeddings()(torch.tensor([ids]))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        where = positions if not self.base.config.model_type.startswith("qwen3_5") else positions.expand(3, 1, -1)
        angles = self.base.rotary_emb(embedded, where)
        found = self.layer(embedded, hidden_TE[None], angles, mask, positions, None)
        return (found[0] if isinstance(found, tuple) else found)[0]

    @torch.no_grad()
    def logits(self, states_TE: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(states_TE)


def write(
    folder: Path,
    variant: str,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    copies: bool = False,
    **changes,
) -> MTP:
    """Write a checkpoint with an MTP layer, and return that layer. ``edit`` changes the tensors that are stored;
    ``copies``: the embedding and the output matrix are stored with the layer, too."""
    checkpoints.write(folder, "qwen2" if variant == "mimo" else variant, **changes)
    mtp = MTP(folder)
    if variant == "mimo":
        mtp.layer.config.mtp_hidden_states_first = True
        mimo = dict(model_type="mimo", architectures=["MiMoForCausalLM"])
        checkpoints.edit_json(folder / "config.json", lambda config: config.update(mimo))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mtp.layer.state_dict().values():
            scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            drawn = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(parameter + drawn if parameter.dim() == 1 else drawn)
    store(folder, variant, mtp, edit, copies)
    return mtp


def store(
    folder: Path,
    variant: str,
    mtp: MTP,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    copies: bool = False,
) -> None:
    """Put the layer's tensors as they are now into the checkpoint of ``folder``."""
    count = len(mtp.base.layers)
    prefix, alone = LAYOUTS[variant]
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in mtp.layer.state_dict().items():
        part, _, rest = name.partition(".")
        found |= {f"{alone[part]}.{rest}": tensor} if part in alone else by_expert(rest, tensor, variant)
    named = {(prefix + name if name.split(".")[0] in PARTS else name): tensor for name, tensor in found.items()}
    named = {name.format(n=count): tensor.clone() for name, tensor in named.items()}
    if copies:
        named[f"model.layers.{count}.embed_tokens.weight"] = mtp.model.get_input_embeddings().weight.detach().clone()
        named[f"model.layers.{count}.shared_head.head.weight"] = mtp.model.lm_head.weight.detach().clone()
    if edit is not None:
        edit(named)
    save_file(tensors | named, folder / "model.safetensors", metadata={"format": "pt"})


PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def by_expert(name: str, tensor: torch.Tensor, variant: str) -> dict[str, torch.Tensor]:
    """The tensors of a decoder layer's part as they are stored: one for each expert, except in Qwen 3.5."""
    if ".experts." not in name or variant.startswith("qwen3_5"):
        return {name: tensor}
    where, _, part = name.rpartition(".")
    if part == "down_proj":
        return {f"{where}.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
    halves = [one.chunk(2) for one in tensor]
    names = ("gate_proj", "up_proj")
    return {f"{where}.{i}.{n}.weight": x for i, both in enumerate(halves) for n, x in zip(names, both)}


def layers_in_config(folder: Path, count: int) -> None:
    """Change the number of layers that config.json gives."""
    checkpoints.edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=count))


def with_random_layer(model: Path, folder: Path) -> Path:
    """A copy of a model of the lab with an MTP layer, made of noise and of its last decoder layer."""
    shutil.copytree(model, folder)
    tensors = dict(read_tensors(model))
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    norm, prefix = tensors["model.norm.weight"], f"model.layers.{last}."
    own = {n.replace(prefix, "mtp.layers.0."): t for n, t in tensors.items() if n.startswith(prefix)}
    own |= {f"mtp.{name}.weight": norm for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    drawn = torch.randn(len(norm), 2 * len(norm), generator=torch.Generator().manual_seed(3))
    own["mtp.fc.weight"] = (drawn * len(norm) ** -0.5).to(norm.dtype)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: t.clone() for name, t in (tensors | own).items()}, folder / "model.safetensors")
    return folder


def train(mtp: MTP, texts: list[list[int]], steps: int, depth: int = 2) -> float:
    """Let the layer learn these texts by heart, ``depth`` tokens ahead, and return the last loss. Only the layer
    learns: the model stays as it is."""
    given = [(mtp.hidden(ids[:-1]).clone(), ids) for ids in texts]
    mtp.layer.train()
    optimizer = torch.optim.Adam(mtp.layer.parameters(), 5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for hidden, ids in given:
            state = hidden
            for ahead in range(depth):
                count = len(ids) - 2 - ahead
                state = mtp.forward(state[:count], ids[1 + ahead : 1 + ahead + count])
                logits = mtp.model.lm_head(state)
                total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(ids[2 + ahead :]))
        total.backward()
        optimizer.step()
    mtp.layer.eval()
    return float(total.detach()) / len(texts) / depth
