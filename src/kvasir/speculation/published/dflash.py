"""DFlash (arXiv 2602.06036) as z-lab publishes it: a few Qwen3 layers that fill a block of masks in one forward.

The block is the anchor and masks. Each layer attends, without causality, over the block and over the text, whose keys
and values it makes of the fused hidden states of the served model. The output of the mask in place i is the guess of
the token at its own position. Embedding and output matrix are the served model's.

Legend: R rows, B sequences, C places of a block, S slots, L tapped layers, E hidden size, Y layers of the head, H query
heads, G KV heads of a layer, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kvasir.kernels.rope import rotate
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir.models.fields import Fields
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.head import Norm
from kvasir.speculation.layer_head import attend
from kvasir.speculation.published.folder import Folder, Layout, Plan
from kvasir.speculation.published.layer import NOT_OURS, PARTS, check_size, layer_fields

BLOCK = 16  # places of a block where a config does not say
# Fields that would change the maths of a head, with the value that is served.
PLAIN = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "is_causal": None}


@dataclass(frozen=True)
class BlockShape:
    """``layers``: tapped; ``depth``: masks of a block; ``kv_heads``: of all ``num_layers`` layers together; ``mask``:
    the id of the mask token."""

    dim: int
    layers: tuple[int, ...]
    depth: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope: RopeSpec
    mask: int
    own_rows: int = 0
    biases: frozenset[str] = frozenset()


class BlockLayer(nn.Module):
    def __init__(self, s: BlockShape) -> None:
        super().__init__()
        groups = s.kv_heads // s.num_layers
        self.shape, self.groups = s, groups
        self.norm, self.ffn_norm = Norm(s.dim, s.norm_eps), Norm(s.dim, s.norm_eps)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.norm_eps), Norm(s.head_dim, s.norm_eps)
        bias = "qkv" in s.biases
        self.q_proj = nn.Linear(s.dim, s.heads * s.head_dim, bias=bias)
        self.kv_proj = nn.Linear(s.dim, 2 * groups * s.head_dim, bias=bias)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.dim, bias="o" in s.biases)
        self.gate_up_proj = nn.Linear(s.dim, 2 * s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.dim, bias=False)

    def keys(self, x_RE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values [R, G, D] of normed rows."""
        k, v = self.kv_proj(x_RE).view(len(x_RE), 2 * self.groups, -1).split(self.groups, 1)
        return rotate(self.k_norm(k.contiguous()), *turns), v

    def forward(
        self,
        h_BCE: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        roots: tuple[torch.Tensor, torch.Tensor],
        sees_BS: torch.Tensor,
    ) -> torch.Tensor:
        """The layer's output for blocks whose text has these keys and values [B, G, S, D]."""
        batch, count, _ = h_BCE.shape
        x_RE = self.norm(h_BCE).flatten(0, 1)
        k_RGD, v_RGD = self.keys(x_RE, turns)
        q_RHD = rotate(self.q_norm(self.q_proj(x_RE).view(len(x_RE), -1, self.shape.head_dim)), *turns)
        q, k, v = (x.unflatten(0, (batch, count)) for x in (q_RHD, k_RGD, v_RGD))
        everything = torch.ones(batch, count, count, dtype=torch.bool, device=h_BCE.device)
        h_BCE = h_BCE + self.o_proj(attend(q, roots, sees_BS, (k, v), everything).flatten(-2))
        gate, up = self.gate_up_proj(self.ffn_norm(h_BCE)).chunk(2, -1)
        return h_BCE + self.down_proj(F.silu(gate) * up)


class BlockHead(nn.Module):
    """``ids`` and ``own_table`` are those of `PublishedHead`: this head uses the model's tokens and embeddings."""

    ids = None
    own_table = None

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.fuse_proj = nn.Linear(len(s.layers) * s.dim, s.dim, bias=False)
        self.state_norm, self.norm = Norm(s.dim, s.norm_eps), Norm(s.dim, s.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(s) for _ in range(s.num_layers))
        self.table: RopeTable | None = None

    def reserve(self, num_positions: int) -> None:
        """Have the rotations of so many positions at hand, on the weights' device."""
        self.table = RopeTable(self.shape.rope, num_positions, self.norm.weight.device)

    def keys(self, taps_RLE: torch.Tensor, position_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, Y * G, D] of committed rows, of all layers."""
        state_RE = self.state_norm(self.fuse_proj(taps_RLE.flatten(1)))
        turns = self.table.rows(position_R)
        pairs = [layer.keys(state_RE, turns) for layer in self.layers]
        return torch.cat([k for k, _ in pairs], 1), torch.cat([v for _, v in pairs], 1)

    def fill(
        self,
        model: ServedModel,
        token_B: torch.Tensor,
        start_B: torch.Tensor,
        depth: int,
        roots: tuple[torch.Tensor, torch.Tensor],
        sees_BS: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [B, depth, V] of the masks behind the anchors ``token`` at positions ``start``. A block is always as
        long as it was trained."""
        s = self.shape
        block_BC = torch.full((len(token_B), 1 + s.depth), s.mask, device=token_B.device)
        block_BC[:, 0] = token_B
        place_BC = start_B[:, None] + torch.arange(1 + s.depth, device=token_B.device)
        h_BCE, turns = model.embed(block_BC), self.table.rows(place_BC.flatten())
        groups = s.kv_heads // s.num_layers
        for i, layer in enumerate(self.layers):
            own = slice(i * groups, (i + 1) * groups)
            h_BCE = layer(h_BCE, turns, (roots[0][:, own], roots[1][:, own]), sees_BS)
        return model.read_out(self.norm(h_BCE[:, 1 : 1 + depth]))


def _check(folder: Folder, fields: Fields, own: Fields) -> None:
    """Refuse a folder whose layers compute something else. ``own``: the fields of ``dflash_config``."""
    for name, value in PLAIN.items():
        found = own.raw.get(name, fields.raw.get(name))
        if found is not None and found != value:
            raise folder.fail(f"{name} is {found!r}, and heads without it are served")
    if "sliding_attention" in (fields.raw.get("layer_types") or ()):
        raise folder.fail("layer_types has sliding_attention, and heads whose layers see the whole text are served")


def _sources(num_layers: int) -> dict[str, tuple[str, ...]]:
    """The stored tensors that fill each weight."""
    sources = {"fuse_proj.weight": ("fc.weight",), "state_norm.weight": ("hidden_norm.weight",)}
    sources["norm.weight"] = ("norm.weight",)
    parts = {k: v for k, v in PARTS.items() if k != "qkv_proj"} | {
        "norm": ("input_layernorm",),
        "q_proj": ("self_attn.q_proj",),
        "kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    }
    for i in range(num_layers):
        for ours, theirs in parts.items():
            for leaf in ("weight", "bias"):
                sources[f"layers.{i}.{ours}.{leaf}"] = tuple(f"layers.{i}.{part}.{leaf}" for part in theirs)
    return sources


class DFlashLayout(Layout):
    def takes(self, folder: Folder) -> bool:
        architectures = folder.config.get("architectures")
        return isinstance(architectures, list) and "DFlashDraftModel" in architectures

    def plan(self, folder: Folder, model: ServedModel) -> Plan:
        fields = Fields(folder.config)
        own = fields.section("dflash_config") or Fields({})
        _check(folder, fields, own)
        layer = layer_fields(folder, fields, "layers.0.")
        num_layers, num_served = fields.integer("num_hidden_layers"), len(model.spec.layers)
        layers = own.numbers("target_layer_ids", fields.numbers("target_layer_ids", ()))
        if not layers or not all(0 <= n < num_served for n in layers):
            raise folder.fail(
                f"target_layer_ids is {list(layers)}, and the served model has layers 0 to {num_served - 1}"
            )
        mask = own.integer("mask_token_id", fields.integer("mask_token_id", -1, least=-1), least=0)
        if not 0 <= mask < model.spec.vocab_size:
            raise folder.fail(f"mask_token_id is {mask}, and the served model has {model.spec.vocab_size} tokens")
        block = own.integer("block_size", fields.integer("block_size", BLOCK), least=2)
        shape = BlockShape(
            dim=check_size(folder, layer["dim"], model),
            layers=layers,
            depth=block - 1,
            num_layers=num_layers,
            heads=layer["heads"],
            kv_heads=num_layers * layer["kv_heads"],
            head_dim=layer["head_dim"],
            ffn=layer["ffn"],
            norm_eps=layer["norm_eps"],
            rope=layer["rope"],
            mask=mask,
            biases=layer["biases"],
        )
        ignored = (*NOT_OURS, "embed_tokens.", "lm_head.")
        return Plan(BlockHead, shape, _sources(num_layers), ignored)
