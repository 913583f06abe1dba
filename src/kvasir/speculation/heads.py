"""Trained drafters that use the served model's hidden states: their modules, and their folder.

All guess from the row *before* the anchor, the last one computed: its hidden states f_p, with the token after it known.

- ``Medusa`` (arXiv 2401.10774): head k = 0, 1, ... is one residual block over the final normed state, x + SiLU(W_k x +
  b_k), read by
  the model's own output matrix: the token k + 2 places after row p.
- ``Eagle`` (arXiv 2503.01840, EAGLE-3): one decoder layer over the fused outputs of several layers and the embedding of
  the next
  token. Its own output stands for the fused states at the next step, and training unrolls these steps ("training-time
  test").

- ``Prompts`` (arXiv 2405.18628, PPD): embeddings that stand behind row p as if they were tokens; the model's own output
  for number j of
  them, read as that of any row, guesses the token j + 2 places after row p. Each may be an ensemble whose outputs are
  averaged.

A folder holds ``config.json`` (kind, shape, and which model it was trained for) and ``model.safetensors``. The model's
embedding and output matrix are used in place, so a head is a few megabytes.

Legend: B rows of a batch, T tokens, N = leading dimensions, L tapped layers, E model dim, H query heads, G KV heads, D
head dim, K heads or prompt tokens, C members of an ensemble.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.kernels.noise import gumbel
from kvasir.kernels.norm import rms_norm
from kvasir.logs import log
from kvasir.models.loader import read_tensors
from kvasir.speculation.drafter import ServedModel

FORMAT = "kvasir-drafter"
WEIGHTS = "model.safetensors"
NEG_INF = -float("inf")


@dataclass(frozen=True)
class MedusaShape:
    """``layers``: whose outputs it reads, always the last one; ``depth``: number of heads."""

    dim: int
    layers: tuple[int, ...]
    depth: int = 4


@dataclass(frozen=True)
class EagleShape:
    """``layers``: of the model, whose outputs are fused; ``depth``: steps that training unrolled."""

    dim: int
    layers: tuple[int, ...]
    depth: int = 6
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    ffn: int = 352
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class PromptShape:
    """``layers``: none is tapped; ``depth``: prompt tokens; ``ensemble``: embeddings of each (the paper's own trainer
    has one)."""

    dim: int
    layers: tuple[int, ...] = ()
    depth: int = 3
    ensemble: int = 1


class Norm(nn.Module):
    """RMS norm, in fp32 whatever the weights are in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.eps_1 = torch.full((1,), eps)  # fewer calls on a CPU, see rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return rms_norm(x.flatten(0, -2), self.weight, self.eps, self.eps_1).view(x.shape)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Medusa(nn.Module):
    kind: ClassVar[str] = "medusa"
    shape_class: ClassVar[type] = MedusaShape

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.depth, shape.dim, shape.dim))  # all heads begin as the model's own
        self.bias = nn.Parameter(torch.zeros(shape.depth, shape.dim))

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """[N, E], the final norm's output -> [N, K, E], to be read by the output matrix."""
        inner = torch.einsum("...e,kfe->...kf", x_NE, self.weight) + self.bias
        return x_NE[..., None, :] + F.silu(inner)

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Nothing to draw: zero weights."""

    def unroll(
        self, features_BTLE: torch.Tensor, normed_BTE: torch.Tensor, embedded_BTE: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """For k = 0, 1, ...: [B, T, E] whose row p predicts token p + 2 + k."""
        yield from self(normed_BTE).unbind(2)


class Eagle(nn.Module):
    kind: ClassVar[str] = "eagle"
    shape_class: ClassVar[type] = EagleShape

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        s = self.shape = shape
        self.fuse_proj = nn.Linear(len(s.layers) * s.dim, s.dim, bias=False)
        self.token_norm, self.state_norm, self.ffn_norm, self.norm = (Norm(s.dim, s.norm_eps) for _ in range(4))
        self.qkv_proj = nn.Linear(2 * s.dim, (s.heads + 2 * s.kv_heads) * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.dim, bias=False)
        self.gate_up_proj = nn.Linear(s.dim, 2 * s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.dim, bias=False)
        self.turns = torch.zeros(0, s.head_dim // 2, dtype=torch.complex64)  # e^(i position frequency): RoPE; no weight

    def reserve(self, num_positions: int) -> None:
        """Have the rotations of so many positions at hand, on the weights' device."""
        device = self.norm.weight.device
        if len(self.turns) < num_positions or self.turns.device != device:
            half = self.shape.head_dim // 2
            frequency = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
            angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
            self.turns = torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64)

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Draw the weights so that the state before the first update is the last tapped layer's output, under the
        model's final norm."""
        s = self.shape
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    std = p.shape[1] ** -0.5 * (0.2 if name.startswith(("o_proj", "down_proj", "fuse_proj")) else 1.0)
                    p.copy_(torch.randn(p.shape, generator=generator) * std)
            self.fuse_proj.weight[:, -s.dim :] += torch.eye(s.dim)
            self.norm.weight.copy_(norm_E)

    # ----------------------------------------------------------------------------------------------- parts, for serving

    def fuse(self, features_NLE: torch.Tensor) -> torch.Tensor:
        """Outputs of the tapped layers [N, L, E] -> states [N, E]."""
        return self.fuse_proj(features_NLE.flatten(-2))

    def mix(self, state_NE: torch.Tensor, embedded_NE: torch.Tensor) -> torch.Tensor:
        """[N, 2E], the layer's input, of states and of the embeddings of the tokens that follow them."""
        return torch.cat([self.token_norm(embedded_NE), self.state_norm(state_NE)], -1)

    def attention(
        self, mixed: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, H, D], keys and values [N, G, D]. RoPE turns neighbouring pairs of numbers, in fp32."""
        s = self.shape
        qkv = self.qkv_proj(mixed).unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim))
        qk, v = qkv.split((s.heads + s.kv_heads, s.kv_heads), -2)
        turned = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * self.turns[positions_N][..., None, :]
        q, k = torch.view_as_real(turned).flatten(-2).to(qkv.dtype).split((s.heads, s.kv_heads), -2)
        return q, k, v

    def finish(self, state_NE: torch.Tensor, attended_NHD: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, E]: the state of the next step; under ``norm``, what the output matrix reads."""
        h = state_NE + self.o_proj(attended_NHD.flatten(-2))
        gate, up = self.gate_up_proj(self.ffn_norm(h)).chunk(2, -1)
        return h + self.down_proj(F.silu(gate) * up)

    # --------------------------------------------------------------------------------------------------------- training

    def unroll(
        self, features_BTLE: torch.Tensor, normed_BTE: torch.Tensor, embedded_BTE: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """For j = 0, 1, ...: [B, T, E] whose row p predicts token p + 2 + j, after j steps over the text's own tokens
        from root p.

        ``embedded``: of token p + 1 in row p. A step's query sees the roots up to its own and its own earlier steps, as
        when drafting.
        """
        count = embedded_BTE.shape[1]
        place = torch.arange(count, device=embedded_BTE.device)
        seen = place[:, None] >= place
        state, embedded = self.fuse(features_BTLE), embedded_BTE
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        group = self.shape.heads // self.shape.kv_heads
        self.reserve(count + self.shape.depth)
        for j in range(self.shape.depth):
            mixed = self.mix(state, embedded)
            q, *kv = self.attention(mixed, place + j)
            k, v = (x.repeat_interleave(group, -2) for x in kv)
            steps.append((k, v))
            roots, values = steps[0]
            scores = torch.einsum("bthd,bshd->bhts", q, roots).masked_fill(~seen, NEG_INF)
            own = [torch.einsum("bthd,bthd->bht", q, k)[..., None] for k, _ in steps[1:]]
            weights = (torch.cat([scores, *own], -1).float() * self.shape.head_dim**-0.5).softmax(-1).to(v.dtype)
            attended = torch.einsum("bhts,bshd->bthd", weights[..., :count], values)
            for i, (_, v) in enumerate(steps[1:]):
                attended = attended + weights[..., count + i].transpose(1, 2)[..., None] * v
            state = self.finish(state, attended)
            yield self.norm(state)
            # Token p + 2 + j comes next in row p; the last rows have none, and predict nothing that exists.
            embedded = torch.cat([embedded[:, 1:], embedded[:, -1:]], 1)


class Prompts(nn.Module):
    kind: ClassVar[str] = "ppd"
    shape_class: ClassVar[type] = PromptShape

    def __init__(self, shape: PromptShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.ensemble, shape.depth, shape.dim))

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Each begins as some token would: drawn with the mean and the spread of the vocabulary's embeddings."""
        with torch.no_grad():
            self.weight.copy_(embed_VE.mean(0) + embed_VE.std(0) * torch.randn(self.weight.shape, generator=generator))


Head = Medusa | Eagle | Prompts
KINDS: dict[str, type[Head]] = {cls.kind: cls for cls in (Medusa, Eagle, Prompts)}


def shape_for(kind: str, dim: int, num_layers: int) -> Any:
    """The shape that training gives a head of this kind for a model: an eighth to a quarter of one of its layers'
    parameters."""
    if kind == "medusa":
        return MedusaShape(dim, (num_layers - 1,))
    if kind == "ppd":
        return PromptShape(dim)
    wide = 64 if dim % 64 == 0 or dim > 128 else 32
    return EagleShape(
        dim,
        tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1})),
        heads=max(2, min(4, dim // wide)),
        head_dim=wide,
        ffn=max(32, dim * 11 // 12 // 32 * 32),
    )


# -------------------------------------------------------------------------------------------------------------- folders


def fingerprint(norm_E: torch.Tensor) -> str:
    """Tells one set of weights of a shape from another: by the scale of the final norm, which every training step
    moves."""
    return hashlib.blake2b(
        norm_E.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes(), digest_size=8
    ).hexdigest()


def write(head: Head, folder: Path, target: dict[str, Any]) -> None:
    """``target``: what `check_target` compares: hidden_size, vocab_size, num_layers, weights (`fingerprint`), and a
    name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": FORMAT, "kind": head.kind, "shape": dataclasses.asdict(head.shape), "target": target}
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in head.named_parameters()}
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read(kind: str, folder: Path) -> tuple[Head, dict[str, Any]]:
    """The head in fp32 and its ``target``. Raises ConfigError for a folder that holds no head of this kind."""
    head, target = made(kind, folder)
    try:
        head.load_state_dict({name: tensor.float() for name, tensor in read_tensors(folder)})
    except (OSError, ConfigError, KeyError, TypeError, ValueError, RuntimeError) as e:
        raise ConfigError(f"{folder} is a broken drafter: {e}. {_how_to_train(kind)}") from e
    return head.eval().requires_grad_(False), target


def _how_to_train(kind: str) -> str:
    return f"Train one with `kvasir train drafter {kind} --target MODEL --out FOLDER`."


def made(kind: str, folder: Path) -> tuple[Head, dict[str, Any]]:
    """The head of a folder, its weights not read yet, and its ``target``. Raises ConfigError."""
    file, train = folder / "config.json", _how_to_train(kind)
    try:
        config = json.loads(file.read_text())
        found = config.get("kind") if config.get("format") == FORMAT else None
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"{folder} holds no drafter: {file.name} cannot be read ({e}). {train}") from e
    if found is None:
        raise ConfigError(f'{folder} holds no drafter (config.json does not say "format": "{FORMAT}"). {train}')
    if found != kind:
        raise ConfigError(f"{folder} holds a drafter of the kind '{found}': use --drafter {found}:model={folder}")
    cls = KINDS[kind]
    try:
        shape = dict(config["shape"])
        shape["layers"] = tuple(shape["layers"])
        return cls(cls.shape_class(**shape)), dict(config["target"])
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise ConfigError(f"{folder} is a broken drafter: {e}. {train}") from e


def check_target(folder: Path, kind: str, trained_for: dict[str, Any], served: dict[str, Any]) -> bool:
    """Whether a head was trained for these very weights. Raises ConfigError when it does not even fit their shape."""
    for key in ("hidden_size", "vocab_size", "num_layers"):
        if trained_for.get(key) != served[key]:
            raise ConfigError(
                f"{folder} was trained for a model with {key} {trained_for.get(key)}, the served one has {served[key]}. Train one with "
                f"`kvasir train drafter {kind} --target MODEL --out FOLDER`, or use --drafter suffix, which needs no weights."
            )
    return trained_for.get("weights") == served["weights"]


def shipped(kind: str) -> Path | None:
    """The folder of the head that comes in the package, for its default model."""
    folder = Path(str(importlib.resources.files("kvasir"))) / "assets" / "drafters" / kind
    return folder if (folder / "config.json").is_file() else None


def folder_of(kind: str, given: str) -> Path:
    """Folder ``given``, or the one in the package. Raises ConfigError where that holds none."""
    folder = Path(given).expanduser() if given else shipped(kind)
    if folder is None:
        raise ConfigError(
            f"the package holds no weights for '{kind}'. Train some with `kvasir train drafter {kind} --target MODEL --out FOLDER`, "
            f"and give --drafter {kind}:model=FOLDER; or use --drafter suffix, which needs none."
        )
    return folder


def planned(kind: str, given: str) -> tuple[Any, int]:
    """Shape and number of weights of a head that will be loaded, from its config alone. Raises ConfigError."""
    with torch.device("meta"):
        head = made(kind, folder_of(kind, given))[0]
    return head.shape, sum(p.numel() for p in head.parameters())


def load_for(kind: str, given: str, model: ServedModel) -> Head:
    """The head of folder ``given`` ("": the one in the package), ready to run beside ``model``. Raises ConfigError
    where it cannot."""
    folder = folder_of(kind, given)
    head, trained_for = read(kind, folder)
    served = {
        "hidden_size": model.spec.hidden_size,
        "vocab_size": model.spec.vocab_size,
        "num_layers": len(model.spec.layers),
        "weights": fingerprint(model.norm.weight),
    }
    if not check_target(folder, kind, trained_for, served):
        log.warning(
            "drafter %s: %s was trained for other weights ('%s') than are served: it changes no token, but drafts worse",
            kind,
            folder,
            trained_for.get("name", "?"),
        )
    return head.to(model.place.device, model.place.dtype)


# -------------------------------------------------------------------------------------------------------------- guesses


@dataclass(frozen=True, slots=True)
class Draws:
    """How some sequences draw: temperature [B] fp32 (below 1e-5: greedy) and noise stream [B] int64. ``hot``: whether
    any of them has noise."""

    temperature_B: torch.Tensor
    stream_B: torch.Tensor
    hot: bool

    @staticmethod
    def numbers(seqs: Sequence[Any]) -> np.ndarray:
        """[2, B] int64 of sequences, for `of` where they are needed."""
        temperatures = np.array([seq.request.params.temperature for seq in seqs], np.float64)
        return np.stack([temperatures.view(np.int64), np.array([seq.stream for seq in seqs], np.uint64).view(np.int64)])

    @staticmethod
    def of(numbers_2B: torch.Tensor, hot: bool) -> Draws:
        return Draws(numbers_2B[0].view(torch.float64).float(), numbers_2B[1], hot)


def hot(seqs: Sequence[Any]) -> bool:
    return any(seq.request.params.temperature >= 1e-5 for seq in seqs)


def guess(logits_BNV: torch.Tensor, draws: Draws, positions_BN: torch.Tensor) -> torch.Tensor:
    """Log-weights [B, N, V] fp32 of the next token, with the noise that the verifying draws at these positions will use
    ("coupled" drafting): what is likeliest here is what the model draws if its distribution is this one."""
    y = logits_BNV.float()
    if draws.hot:
        count = logits_BNV.shape[1]
        noise = gumbel(
            draws.stream_B[:, None].expand(-1, count).flatten(), positions_BN.flatten(), logits_BNV.shape[-1]
        ).view_as(y)
        temperature = draws.temperature_B[:, None, None]
        y = torch.where(temperature >= 1e-5, y / temperature.clamp(min=1e-5) + noise, y)
    return y.log_softmax(-1)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small host array on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
