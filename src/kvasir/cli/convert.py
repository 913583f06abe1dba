"""``kvasir convert``: rewrite a checkpoint folder with one converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, from_lab
from kvasir.progress import Progress
from kvasir.technique import module

# Package of what converters take from training.
TRAINING = "kvasir.convert.training"


def run(spec: str, source: str, target: Path, device: str | None = None) -> None:
    """Convert ``source`` into the folder ``target`` and say what came out. ``device``: where a calibration runs
    (None: a GPU, if there is one). Raises ConfigError."""
    from kvasir.convert.checkpoint import convert
    from kvasir.convert.converter import load_converter
    from kvasir.models import checkpoint
    from kvasir.models.loader import read_headers

    converter, folder = load_converter(spec), checkpoint.resolve(source)
    total = sum(t.num_bytes for t in read_headers(folder))
    options = _calibration(device) if converter.calibration else {}
    with Progress("converting", brief=True) as bar:
        shown = Shown(bar, total)
        record = convert(converter, spec, folder, target, progress=shown.read, calibrated=shown.layer, **options)
    promise = converter.result or (
        f"the same function as {record['source']}" if record["exact"] else f"an approximation of {record['source']}"
    )
    stored = sum(file.stat().st_size for file in target.glob("*.safetensors*") if file.suffix != ".json")
    print(f"{target}: {stored / 2**20:,.1f} MiB, {promise}")


class Shown:
    """The progress of a conversion: the layers of each pass of a calibration, then MiB of ``total`` bytes."""

    def __init__(self, bar: Progress, total: int) -> None:
        self.bar, self.total = bar, total
        self.bytes = self.passes = self.last = 0

    def layer(self, done: int, of: int) -> None:
        """Show that layer number ``done`` of ``of`` ran over the texts."""
        self.passes += done <= self.last or not self.passes
        self.last = done
        self.bar.title = f"calibrating, pass {self.passes}, layer"
        self.bar.show(done, of)

    def read(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self.bytes += num_bytes
        self.bar.title = "converting, MiB"
        self.bar.show(self.bytes >> 20, self.total >> 20)


def _calibration(device: str | None) -> dict[str, Any]:
    """The device that a calibration runs on, and its default texts if kvasir-lab is there to give some."""
    import torch

    texts = module(TRAINING, "texts")
    return {
        "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "texts": texts and texts.default_texts,
    }


def heal(*given: Any) -> None:
    """Train a converted model on its source's answers: `kvasir_lab.healing.command`. Raises ConfigError without it."""
    found = module(TRAINING, "heal")
    if found is None:
        raise ConfigError(from_lab("kvasir convert heal"))
    found.heal(*given)
