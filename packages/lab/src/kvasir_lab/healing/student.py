"""A decoder in plain torch with gradients, over the tensors of its checkpoint: what healing trains.

Each of the engine's weight slots is a view of a stored tensor (`kvasir.models.stored`), so that any family's checkpoint
is read, and written back under its own names. The engine serves what is written.

Experts run one after the other over the rows that chose them; their router is trained by what it weighs, and by no loss
of its own.

Legend: B texts, T tokens, E model dim, H query heads, G KV heads, D head dim, R rank of a latent, Q rotary elements, V
vocabulary, X experts, K experts per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvasir.kernels.activation import ACTIVATIONS
from kvasir.kernels.moe_routing import choose_reference
from kvasir.kernels.rope import rotate
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import DenseSpec, GQASpec, MLASpec, MoESpec, NormSpec
from kvasir.models.families import build_spec, find_family
from kvasir.models.loader import read_tensors, renamed
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import view_of

# How `kvasir convert mla` writes a latent that DeepSeek's norm must not change (`convert.converters.mla`).
SMALL, NORM_WEIGHT = 2.0**-30, 2.0**20


@dataclass(frozen=True)
class Unnormed:
    """A latent of so small a scale that its norm does nothing. Training needs numbers of ordinary size, so the tensors
    are divided by their ``scales`` and the norm is left out."""

    scales: dict[str, torch.Tensor]

    @classmethod
    def of(cls, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Unnormed:
        """The scales of a checkpoint in DeepSeek's form that was converted; none of other checkpoints."""
        found: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(spec.layers):
            own = f"model.layers.{index}.self_attn."
            norm = tensors.get(own + "kv_a_layernorm.weight")
            if not isinstance(layer.mixer, MLASpec) or norm is None or not bool((norm == NORM_WEIGHT).all()):
                continue
            rows = torch.ones(layer.mixer.rank + layer.mixer.rope_dim, 1)
            rows[: layer.mixer.rank] = SMALL
            found[own + "kv_a_proj_with_mqa.weight"] = rows
            found[own + "kv_b_proj.weight"] = torch.tensor(1 / (SMALL * 1000 * NORM_WEIGHT))
        return cls(found)


def why_not(spec: ModelSpec) -> str | None:
    """Say why a model cannot be healed, as the end of a sentence; None: it can."""
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if not isinstance(layer.ffn, DenseSpec | MoESpec):
            return f"has a block in layer {index} that healing does not have: it trains dense blocks and experts"
        if not isinstance(mixer, (GQASpec, MLASpec)) or layer.cache_of is not None or layer.embedding or layer.scaled:
            return f"has parts in layer {index} that healing lacks: it has norms, attention, dense blocks, experts"
        if isinstance(mixer, GQASpec):
            odd = ("gated", "keys_are_values", "value_norm", "flat_norm", "sinks", "query_scale")
            if any(getattr(mixer, name) for name in odd):
                return f"has attention in layer {index} that healing does not have: {', '.join(odd)} are left out"
        elif mixer.query_scale is not None or mixer.q_rank is not None:
            return f"has queries in layer {index} that no converted model has"
    return None


class Student(torch.nn.Module):
    """The decoder of ``config`` with ``tensors`` as parameters, fp32."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], length: int) -> None:
        super().__init__()
        self.spec = build_spec(config)
        self.family = find_family(self.spec.family)
        self.kept = Unnormed.of(self.spec, tensors)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        prefixes = getattr(self.family, "RENAMED", {})
        self.own_names = {renamed(name, prefixes): name for name in tensors}
        self.weights = torch.nn.ParameterList()
        self.places: dict[str, int] = {}
        for name, tensor in tensors.items():
            self.places[name] = len(self.weights)
            scale = self.kept.scales.get(name)
            self.weights.append(torch.nn.Parameter(tensor.float() if scale is None else tensor.float() / scale))
        ropes = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        self.tables = {rope: RopeTable(rope, length, torch.device("cpu")) for rope in ropes}

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any], length: int) -> Student:
        """Read a checkpoint. ``length``: most tokens of a text. Raises ConfigError for one that cannot be read."""
        return cls(config, dict(read_tensors(folder)), length)

    def to_device(self, device: torch.device) -> Student:
        """Move parameters and tables of angles."""
        self.to(device)
        for table in self.tables.values():
            table.table = table.table.to(device)
        return self

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors as the checkpoint holds them."""
        found = {}
        for name, at in self.places.items():
            value, scale = self.weights[at].detach().cpu(), self.kept.scales.get(name)
            found[name] = (value if scale is None else value * scale).to(self.dtypes[name], copy=True)
        return found

    def attention(self) -> list[torch.nn.Parameter]:
        """Parameters of converted attentions: what makes and reads latents, without the output projection."""
        found = []
        for name, at in self.places.items():
            parts = name.split(".")
            if "self_attn" in parts and parts[-2] != "o_proj" and "norm" not in parts[-2]:
                index = int(parts[parts.index("layers") + 1])
                if isinstance(self.spec.layers[index].mixer, MLASpec):
                    found.append(self.weights[at])
        return found

    def weight(self, slot: str) -> torch.Tensor:
        """The weight of one of the engine's slots, as a view of its parameter."""
        view = view_of(self.family.stored(slot, self.spec))
        part = self.weights[self.places[self.own_names[view.name]]]
        part = part[view.index] if view.index else part
        return part.mT if view.transposed else part

    # ------------------------------------------------------------------------------------------------------- the model

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Input of the first layer, [B, T, E]."""
        return F.embedding(ids_BT, self.weight("embed.weight")) * self.spec.embed_scale

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] in fp32 of what the last layer gives."""
        spec = self.spec
        x = self._norm(h, "norm.weight", spec.final_norm)
        found = F.linear(x, self.weight("embed.weight" if spec.tied else "head.weight")).float() * spec.logit_scale
        cap = spec.logit_softcap
        return found if cap is None else cap * torch.tanh(found / cap)

    def block(self, index: int, h_BTE: torch.Tensor) -> torch.Tensor:
        """Layer ``index`` of its input, [B, T, E]."""
        layer, at = self.spec.layers[index], f"layers.{index}."
        for part, run in (("mixer", self._mixer), ("ffn", self._ffn)):
            x = h_BTE if layer.norms == "post" else self._norm(h_BTE, f"{at}{part}_norm.weight", layer.norm)
            x = run(layer, f"{at}{part}.", x)
            x = x if layer.norms == "pre" else self._norm(x, f"{at}{part}_post_norm.weight", layer.norm)
            h_BTE = h_BTE + x * layer.residual_scale
        return h_BTE

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        h = self.embed(ids_BT)
        for index in range(len(self.spec.layers)):
            h = self.block(index, h)
        return self.logits(h)

    def _norm(self, x: torch.Tensor, slot: str, spec: NormSpec) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
        return (wide * (self.weight(slot) + spec.offset)).to(x.dtype)

    def _linear(self, x: torch.Tensor, slot: str, bias: bool = False) -> torch.Tensor:
        return F.linear(x, self.weight(f"{slot}.weight"), self.weight(f"{slot}.bias") if bias else None)

    def _ffn(self, layer: LayerSpec, at: str, x: torch.Tensor) -> torch.Tensor:
        ffn = layer.ffn
        if isinstance(ffn, MoESpec):
            return self._experts(ffn, at, x.flatten(0, -2)).view(x.shape)
        assert isinstance(ffn, DenseSpec)
        return self._dense(ffn.activation, at, x, ffn.bias)

    def _dense(self, activation: str, at: str, x: torch.Tensor, bias: bool) -> torch.Tensor:
        gate, up = (self._linear(x, f"{at}{part}", bias) for part in ("gate", "up"))
        act = ACTIVATIONS[activation]
        return self._linear(act(gate, up) if activation == "clamped_swiglu" else act(gate) * up, f"{at}down", bias)

    def _route(self, spec: MoESpec, at: str, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts [T, K], as `kvasir.layers.ffn.moe` chooses them. The choice has no gradient."""
        with torch.autocast(x_TE.device.type, enabled=False):
            logits = self._linear(x_TE.float(), f"{at}router", spec.router_bias)
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
        correction = self.weight(f"{at}correction").detach() if spec.correction else None
        how = spec.renormalize, spec.weight_scale, spec.groups, spec.top_groups, spec.group_best
        weights, ids = choose_reference(scores, correction, spec.top_k, *how)
        return (weights * self.weight(f"{at}expert_scale")[ids] if spec.expert_scale else weights), ids

    def _experts(self, spec: MoESpec, at: str, x_TE: torch.Tensor) -> torch.Tensor:
        """Experts of the rows, and the one that every row uses: [T, E]."""
        weights_TK, ids_TK = self._route(spec, at, x_TE)
        order = ids_TK.flatten().argsort(stable=True)  # (row, choice) pairs, grouped by expert
        rows, parts = order // spec.top_k, []
        for expert, mine in enumerate(x_TE[rows].split(ids_TK.flatten().bincount(minlength=spec.num_experts).tolist())):
            if len(mine):
                parts.append(self._dense(spec.activation, f"{at}experts.{expert}.", mine, spec.bias).to(x_TE.dtype))
        weighed = torch.cat(parts) * weights_TK.flatten()[order].unsqueeze(-1).to(x_TE.dtype)
        out_TE = torch.zeros_like(x_TE).index_add(0, rows, weighed)
        if not spec.shared_size:
            return out_TE
        shared = self._dense(spec.activation, f"{at}shared.", x_TE, False)
        if spec.shared_gate:
            shared = shared * self._linear(x_TE, f"{at}shared_gate").sigmoid()
        return out_TE + shared

    def _mixer(self, layer: LayerSpec, at: str, x: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        heads = self._latent_heads if isinstance(mixer, MLASpec) else self._grouped_heads
        q, k, v = heads(layer, at, x)
        out = attend(q, k, v, mixer.scale, mixer.window, mixer.softcap)
        bias = "o" in mixer.biases if isinstance(mixer, MLASpec) else mixer.o_bias
        return self._linear(out.transpose(1, 2).flatten(2), f"{at}o", bias)

    def _grouped_heads(self, layer: LayerSpec, at: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries [B, H, T, D], and keys and values of as many heads."""
        mixer = layer.mixer
        counts = {"q": mixer.num_heads, "k": mixer.num_kv_heads, "v": mixer.num_kv_heads}
        found = {}
        for name, count in counts.items():
            found[name] = self._linear(x, at + name, mixer.qkv_bias).unflatten(-1, (count, -1))
            if mixer.qk_norm is not None and name != "v":
                found[name] = self._norm(found[name], f"{at}{name}_norm.weight", mixer.qk_norm)
            if name != "v":
                found[name] = self._turn(layer, found[name])
            found[name] = found[name].transpose(1, 2)
        share = mixer.num_heads // mixer.num_kv_heads
        return found["q"], found["k"].repeat_interleave(share, 1), found["v"].repeat_interleave(share, 1)

    def _latent_heads(self, layer: LayerSpec, at: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries and keys [B, H, T, D + Q], and values [B, H, T, D], made of the latent."""
        mixer, parts = layer.mixer, ("nope", "real", "imag") if layer.mixer.rope_dim else ("nope",)
        if mixer.writer is None:
            names = {"q": [f"q.{h}.{part}" for h in range(mixer.num_heads) for part in parts]}
            names["kv_a"] = [f"kv_a.{part}" for part in parts]
            q, row = (self._joined(x, at, names[name], name in mixer.biases) for name in ("q", "kv_a"))
            q = q.unflatten(-1, (mixer.num_heads, -1))
        else:
            q, row = self._written(mixer, at, x)
        latent, rope = row.split((mixer.rank, mixer.rope_dim), -1)
        if mixer.norm is not None and not self.kept.scales:
            latent = self._norm(latent, f"{at}kv_norm.weight", mixer.norm)
        q_nope, q_rope = q.split((mixer.nope_dim, mixer.rope_dim), -1)
        if mixer.rope_dim:
            both = self._turn(layer, torch.cat((q_rope, rope.unsqueeze(-2)), -2))
            q_rope, rope = both[..., :-1, :], both[..., -1:, :]
        heads = range(mixer.num_heads)
        key, value = (torch.cat([self.weight(f"{at}kv_b.{h}.{n}.weight") for h in heads]) for n in ("key", "value"))
        k, v = (F.linear(latent, w).unflatten(-1, (mixer.num_heads, -1)) for w in (key, value))
        if mixer.rope_dim:
            k = torch.cat((k, rope.expand(*k.shape[:-1], -1)), -1)
        return torch.cat((q_nope, q_rope), -1).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _joined(self, x: torch.Tensor, at: str, slots: list[str], bias: bool) -> torch.Tensor:
        """One product with the rows of several slots."""
        weight, offset = (
            torch.cat([self.weight(f"{at}{slot}.{leaf}") for slot in slots]) if leaf == "weight" or bias else None
            for leaf in ("weight", "bias")
        )
        return F.linear(x, weight, offset)

    def _written(self, mixer: MLASpec, at: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, T, H, D + Q] and rows [B, T, R + Q] by a writer."""
        writer = mixer.writer
        assert writer is not None
        q, k, v = (self._linear(x, at + name) for name in ("q", "k", "v"))
        q = self._norm(q.unflatten(-1, (mixer.num_heads, -1)), f"{at}writer.q_norm.weight", writer.norm)
        k = k.unflatten(-1, (writer.num_kv_heads, -1))
        k = self._norm(k, f"{at}writer.k_norm.weight", writer.norm).flatten(-2)
        row = self._linear(torch.cat((k, v), -1), f"{at}writer.latent")
        if not mixer.rope_dim:
            return q, row
        rope = torch.einsum("bthd,hdq->bthq", q, self.weight(f"{at}writer.q_rope.weight").to(q.dtype))
        return torch.cat((q, rope), -1), torch.cat((row, self._linear(k, f"{at}writer.rope")), -1)

    def _turn(self, layer: LayerSpec, x_BTHD: torch.Tensor) -> torch.Tensor:
        if layer.rope is None:
            return x_BTHD
        texts, length = x_BTHD.shape[:2]
        cos, sin = self.tables[layer.rope].rows(torch.arange(length, device=x_BTHD.device))
        rows = rotate(x_BTHD.flatten(0, 1).contiguous(), cos.repeat(texts, 1, 1, 1), sin.repeat(texts, 1, 1, 1))
        return rows.view(x_BTHD.shape)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention of [B, H, T, ...] over equal lengths."""
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    rows = torch.arange(q.shape[2], device=q.device)
    far = rows[:, None] - rows
    hidden = (far < 0) if window is None else (far < 0) | (far >= window)
    scores = (q @ k.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v
