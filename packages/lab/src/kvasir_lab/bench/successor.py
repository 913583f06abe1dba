"""Checkpoints of known shapes whose greedy answer is known beforehand: the token after t is always ``successor(t)``.

With random weights the best two logits lie close together. A row that verifies drafts rounds differently from a row
that decodes, so an answer in bf16 does not repeat the one given before. In a *successor model* the best logit leads by
far more than any rounding. The row of the output projection for ``successor(t)`` is the embedding of t, and the last
product of every mixer and feed-forward block has small weights, so the embedding outweighs what the layers add to it.
All other weights are random, as ``load_format dummy`` draws them. No weight is zero that dummy weights have, so every
kernel does its full work.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.errors import ConfigError
from kvasir.models.stored import View, view_of

if TYPE_CHECKING:
    import torch

# Parts of a layer whose products are added to the residual stream.
LAST = ("o", "down")
# Factor of their weights. A product then adds elements of some 0.01 to an embedding with elements of order one, and
# the products of 64 layers together some 0.1.
QUIET = 0.01
# A token and its successor lie this share of the vocabulary apart.
SHARE = 0.618
# Rows of the embedding that are normalised at a time.
ROWS = 1 << 14
# Bytes of an element (bf16), and of a shard on disk.
ITEM, SHARD = 2, 2 << 30


def successor(token: int, vocab: int) -> int:
    """The token after ``token``. All ids of the vocabulary form one cycle."""
    return (token + step(vocab)) % vocab


def step(vocab: int) -> int:
    """Distance of a token from its successor: coprime to ``vocab``, so that no id comes twice before all have come."""
    return next(n for n in range(max(1, int(SHARE * vocab)), 0, -1) if math.gcd(n, vocab) == 1)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to store: one slot that it fills, its shape, and the range ±``bound`` of its random numbers (0: every
    element is ``value``)."""

    slot: str
    shape: tuple[int, ...]
    bound: float
    value: float


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a plain checkpoint that fits ``config``, by their stored names."""
    import torch

    from kvasir.layers.weights import Placement
    from kvasir.models.decoder import Decoder
    from kvasir.models.families import build_spec, find_family

    spec = build_spec(config)
    stored = find_family(spec.family).stored
    found: dict[str, Tensor] = {}
    for name, slot in Decoder(spec, Placement(torch.device("meta"), torch.bfloat16), num_positions=1).slots().items():
        view = view_of(stored(name, spec))
        shape = _least_shape(view, tuple(slot.shape))
        if view.name in found:
            shape = tuple(map(max, shape, found[view.name].shape))
        matrix = slot.target.dim() >= 2 and not slot.repeat
        bound = (3.0 / slot.shape[-1]) ** 0.5 if matrix else 0.0
        bound *= QUIET if name.split(".")[-2] in LAST else 1.0
        scale = QUIET if name.endswith("post_norm.weight") else 1.0  # these norms undo small weights before them
        value = scale - slot.offset if name.endswith(("norm.weight", "scale")) else 0.0
        found[view.name] = Tensor(name, shape, bound, value)
    return found


def _least_shape(view: View, part: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest shape of a stored tensor in which ``view`` finds a part of the shape ``part``."""
    left = [*part[:-2], part[-1], part[-2]] if view.transposed else [*part]
    found = []
    for pick in view.index:
        if isinstance(pick, int):
            found.append(pick + 1)
        else:  # the end of a slice may be open
            found.append((pick.start or 0) + (left.pop(0) - 1) * (pick.step or 1) + 1)
    return (*found, *left)


@contextlib.contextmanager
def successor_checkpoint(shape: str) -> Iterator[str]:
    """Yield a folder with a successor model of the shape, in bf16 and with an output projection of its own.

    The numbers are drawn on the GPU if there is one, and at most some GB are in memory at a time. Raises ConfigError
    for an unknown or quantised shape, and where the disk has no room.
    """
    from safetensors import SafetensorError

    from kvasir.convert.checkpoint import write_tensors

    with shape_folder(shape) as source:  # refuses an unknown shape
        if "quantization_config" in SHAPES[shape]:
            raise ConfigError(f"shape '{shape}' is quantised, and a successor model has plain weights")
        config = SHAPES[shape] | {"tie_word_embeddings": False}
        tensors = tensors_of(config)
        _check_room(shape, sum(math.prod(t.shape) for t in tensors.values()) * ITEM)
        try:
            write_tensors(Path(source), _drawn(tensors), SHARD)
            (Path(source) / "config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"the weights of {shape} cannot be written: {e}. {_advice()}") from e
        yield source


def _check_room(shape: str, size: int) -> None:
    if (free := shutil.disk_usage(tempfile.gettempdir()).free) < size:
        raise ConfigError(
            f"the weights of {shape} take {size / 1e9:.1f} GB on disk, and {tempfile.gettempdir()} has "
            f"{free / 1e9:.1f} GB free. {_advice()}"
        )


def _advice() -> str:
    return "Set TMPDIR to a folder on a disk with more room."


def _drawn(tensors: dict[str, Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its values, on the CPU. The embedding comes before the output projection, which is made of
    it."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    embed_VE = torch.empty(0)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].slot == "head.weight"):
        if tensor.slot == "head.weight":
            yield name, embed_VE.roll(step(tensor.shape[0]), 0)
            continue
        filled = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
        if tensor.bound:
            filled.uniform_(-tensor.bound, tensor.bound, generator=generator)
        else:
            filled.fill_(tensor.value)
        if tensor.slot == "embed.weight":
            for part in filled.split(ROWS):  # of one length, so that each row is the one most like itself
                part.copy_(part.float() / part.float().square().mean(-1, keepdim=True).sqrt())
            embed_VE = filled.cpu()
        yield name, embed_VE if tensor.slot == "embed.weight" else filled.cpu()
    del filled
    if device.type == "cuda":
        torch.cuda.empty_cache()
