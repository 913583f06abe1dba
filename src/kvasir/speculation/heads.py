"""Trained drafters that use the served model's hidden states: their folders, and guesses that all of them make alike.

A folder holds ``config.json`` (kind, shape, and which model it was trained for) and ``model.safetensors``. The model's
embedding and output matrix are used in place, so a head is a few megabytes. The modules are in ``head_kinds``.

Legend: B sequences, N rows of each, E model dim, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from kvasir import technique
from kvasir.errors import ConfigError, nearest
from kvasir.kernels.noise import gumbel
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors
from kvasir.plain_files import refuse_special
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.head import Head

FORMAT = "kvasir-drafter"
WEIGHTS = "model.safetensors"
KINDS = "kvasir.speculation.head_kinds"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
NEW = "new"  # in place of a folder: random weights, from which ``--learn`` starts


def kinds() -> list[str]:
    """Names of the kinds of heads."""
    return technique.own(KINDS)


def class_of(kind: str) -> type[Head]:
    """The class of a kind. Raises ConfigError for a name that is none."""
    if kind not in kinds():
        raise ConfigError(f"no trained drafter named '{kind}'; there are {', '.join(kinds())}.{nearest(kind, kinds())}")
    return technique.find(KINDS, kind, Head)[0]


# -------------------------------------------------------------------------------------------------------------- folders


def fingerprint(norm_E: torch.Tensor) -> str:
    """Tells one set of weights of a shape from another: by the scale of the final norm, which every training step
    moves."""
    return hashlib.blake2b(
        norm_E.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes(), digest_size=8
    ).hexdigest()


def write(head: Head, folder: Path, target: dict[str, Any]) -> None:
    """Write a head's folder. ``target`` is what `check_target` compares: hidden_size, vocab_size, num_layers, weights
    (`fingerprint`), and a name."""
    write_tensors(head, dict(head.named_parameters()), folder, target)


def write_tensors(head: Head, found: Mapping[str, torch.Tensor], folder: Path, target: dict[str, Any]) -> None:
    """Write the folder of a head like ``head`` whose weights are ``found``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": FORMAT, "kind": head.kind, "shape": dataclasses.asdict(head.shape), "target": target}
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in found.items()}
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
    refuse_special(folder)
    try:
        config = json.loads(file.read_text())
        found = config.get("kind") if config.get("format") == FORMAT else None
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"{folder} holds no drafter: {file.name} cannot be read ({e}). {train}") from e
    if found is None:
        raise ConfigError(f'{folder} holds no drafter (config.json does not say "format": "{FORMAT}"). {train}')
    if found != kind:
        raise ConfigError(f"{folder} holds a drafter of the kind '{found}': use --drafter {found}:model={folder}")
    cls = class_of(kind)
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
                f"{folder} was trained for a model with {key} {trained_for.get(key)}, "
                f"but the served one has {served[key]}. {_how_to_train(kind)} "
                "Or use --drafter suffix, which needs no weights."
            )
    return trained_for.get("weights") == served["weights"]


def facts_of(model: ServedModel) -> dict[str, Any]:
    """Facts of the served model that `check_target` compares."""
    return {
        "hidden_size": model.spec.hidden_size,
        "vocab_size": model.spec.vocab_size,
        "num_layers": len(model.spec.layers),
        "weights": fingerprint(model.norm.weight),
    }


def shipped(kind: str) -> Path | None:
    """The folder of the head that comes in the package, for its default model."""
    folder = Path(str(importlib.resources.files("kvasir"))) / "assets" / "drafters" / kind
    return folder if (folder / "config.json").is_file() else None


def folder_of(kind: str, given: str) -> Path:
    """Folder ``given`` (or that of a hub id, "owner/name", where there is no such folder), or the one in the package.
    Raises ConfigError where that holds none."""
    folder = Path(given).expanduser() if given else shipped(kind)
    if given and not folder.exists() and HUB_ID.fullmatch(given):
        folder = checkpoint.resolve(given)
    if folder is None:
        raise ConfigError(
            f"the package holds no weights for '{kind}'. {_how_to_train(kind).removesuffix('.')}, and "
            f"give --drafter {kind}:model=FOLDER; or use --drafter suffix, which needs none."
        )
    return folder


def planned(kind: str, given: str, model: ServedModel) -> tuple[Any, int]:
    """Shape and number of weights of a head that will be loaded, from its config alone. Raises ConfigError."""
    with torch.device("meta"):
        head = begun(kind, model) if given == NEW else made(kind, folder_of(kind, given))[0]
    return head.shape, sum(p.numel() for p in head.parameters())


def begun(kind: str, model: ServedModel) -> Head:
    """A head of the shape that training gives one for this model, before its first weights are set."""
    cls = class_of(kind)
    return cls(cls.shape_for(model.spec.hidden_size, len(model.spec.layers)))


def load_for(kind: str, given: str, model: ServedModel) -> Head:
    """The head of folder ``given`` ("": the one in the package), ready to run with ``model``. Raises ConfigError where
    it cannot."""
    if given == NEW:
        head = begun(kind, model)
        rows = torch.arange(min(model.spec.vocab_size, 4096), device=model.place.device)
        norm, embedded = model.norm.weight.float().cpu(), model.embed(rows).float().cpu()
        head.begin_with(norm, embedded, torch.Generator().manual_seed(0))
        return head.to(model.place.device, model.place.dtype).eval().requires_grad_(False)
    folder = folder_of(kind, given)
    head, trained_for = read(kind, folder)
    if not check_target(folder, kind, trained_for, facts_of(model)):
        log.warning(
            "drafter %s: %s was trained for other weights ('%s') than the served ones: outputs stay "
            "the same (outside exact mode up to ties), but drafts are worse",
            kind,
            folder,
            trained_for.get("name", "?"),
        )
    return head.to(model.place.device, model.place.dtype)


# -------------------------------------------------------------------------------------------------------------- guesses


@dataclass(frozen=True, slots=True)
class Draws:
    """The way some sequences draw: temperature [B] fp32 (below 1e-5: greedy) and noise stream [B] int64. ``hot``:
    whether any of them has noise."""

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


def guess(
    logits_BNV: torch.Tensor,
    draws: Draws,
    positions_BN: torch.Tensor,
    ids_V: torch.Tensor | None = None,
    vocab_size: int = 0,
) -> torch.Tensor:
    """Log-weights [B, N, V] fp32 of the next token, with the noise that the verifying draws at these positions will use
    ("coupled" drafting): what is likeliest here is what the model draws if its distribution is this one.

    ``ids_V``: the model's token for each column of a reduced vocabulary, out of ``vocab_size``; None: they are the
    same. Noise belongs to the model's tokens."""
    y = logits_BNV.float()
    if draws.hot:
        count = logits_BNV.shape[1]
        noise = gumbel(
            draws.stream_B[:, None].expand(-1, count).flatten(),
            positions_BN.flatten(),
            logits_BNV.shape[-1] if ids_V is None else vocab_size,
        )
        noise = (noise if ids_V is None else noise[:, ids_V]).view_as(y)
        temperature = draws.temperature_B[:, None, None]
        y = torch.where(temperature >= 1e-5, y / temperature.clamp(min=1e-5) + noise, y)
    return y.log_softmax(-1)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small host array on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def send_to(array: np.ndarray, there: torch.Tensor) -> None:
    """Copy a small host array into a tensor, without waiting for it."""
    tensor = torch.from_numpy(array)
    there.copy_(tensor.pin_memory() if there.is_cuda else tensor, non_blocking=True)
