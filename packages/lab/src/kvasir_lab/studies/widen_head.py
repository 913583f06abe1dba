"""Give a trained head the size of a widened model: `kvasir_lab/studies/widen_head.py KIND MODEL OUT --size 8b`.

KIND is medusa or ppd, MODEL the small model that the head was trained for, and OUT goes with what
`kvasir_lab/studies/widen_checkpoint.py MODEL` writes at the same size: drafts are those of the small head, and a call
costs what it does in a large model. The further dimensions are zero.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.models.fill import read_tensor
from kvasir.models.loader import read_headers
from kvasir.speculation import heads
from kvasir_lab.studies.widen_checkpoint import SIZES, Size, Widened, wider_config
from kvasir_lab.study import Report, study

KINDS = ("medusa", "ppd")


def widen(kind: str, given: str, model: Path, out: Path, size: Size, spread: bool = False) -> None:
    """Write the widened head's folder. ``given``: folder of the small head ("": the packaged one). Raises
    ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"heads of the kind '{kind}' cannot be widened; these can: {', '.join(KINDS)}")
    config = json.loads((model / "config.json").read_text())
    wide_config = wider_config(config, size)
    small = {stored.name: read_tensor(stored) for stored in read_headers(model)}
    wide = Widened(small, config, size, torch.device("cpu"), spread=spread)
    head, target = heads.read(kind, heads.folder_of(kind, given))
    # The small model's last layer is tapped. Idle layers behind it write nothing, so the last layer has the same state.
    layers = tuple(size.layers - 1 for _ in head.shape.layers)
    large = type(head)(dataclasses.replace(head.shape, dim=size.hidden, layers=layers))
    with torch.no_grad():
        for name, whole in large.named_parameters():
            own = dict(head.named_parameters())[name]
            whole.zero_()[tuple(slice(length) for length in own.shape)] = own
    told = target | {
        "name": f"{target['name']}-wide",
        "hidden_size": size.hidden,
        "num_layers": wide_config["num_hidden_layers"],
        "weights": heads.fingerprint(wide._norm("model.norm.weight")),
    }
    heads.write(large, out, told)


@study()
def main(
    report: Report,
    kind: Annotated[str, KINDS],
    model: Annotated[str, "the small model: a folder, or a name such as base"],
    output: Annotated[Path, "folder to write"],
    *,
    head: Annotated[str, "folder of the small head; default: the packaged one"] = "",
    size: Annotated[str, SIZES] = "8b",
) -> None:
    widen(kind, head, resolve(model), output, SIZES[size])
