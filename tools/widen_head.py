"""Give a trained head the size of a widened model: `tools/widen_head.py KIND MODEL OUT --size 8b`.

KIND is medusa or ppd, MODEL the small model that the head was trained for, and OUT goes with what
`tools/widen_checkpoint.py MODEL` writes at the same size: drafts are those of the small head, and a call costs what it
does in a large model. The further dimensions are zero.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from kvasir.errors import ConfigError  # noqa: E402
from kvasir.models.checkpoint import resolve  # noqa: E402
from kvasir.models.fill import read_tensor  # noqa: E402
from kvasir.models.loader import read_headers  # noqa: E402
from kvasir.speculation import heads  # noqa: E402
from tools.widen_checkpoint import SIZES, Size, Widened, wider_config  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", help="the small model: a folder, or a name such as base")
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", default="", help="folder of the small head; default: the packaged one")
    parser.add_argument("--size", choices=SIZES, default="8b")
    given = parser.parse_args()
    widen(given.kind, given.head, resolve(given.model), given.out, SIZES[given.size])


if __name__ == "__main__":
    main()
