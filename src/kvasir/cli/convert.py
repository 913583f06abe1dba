"""``kvasir convert``: rewrite a checkpoint folder with one converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.progress import Progress


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


def heal(
    source: str,
    target: Path,
    teacher: str | None,
    minutes: float | None,
    steps: int | None,
    texts: Path | None,
    resume: bool,
    device: str | None,
) -> None:
    """Train a converted model on its source's answers, and say what came out. Raises ConfigError."""
    import torch

    from kvasir.errors import ConfigError
    from kvasir.lab.healing import data
    from kvasir.lab.healing.heal import Plan
    from kvasir.lab.healing.heal import heal as train
    from kvasir.models import checkpoint

    if teacher is None:
        raise ConfigError("healing needs --teacher MODEL: the model that was converted")
    if minutes is not None and steps is not None:
        raise ConfigError("give --minutes or --steps, not both")
    plan = Plan(steps=steps) if minutes is None else Plan(minutes=minutes)
    folders = checkpoint.resolve(source), checkpoint.resolve(teacher)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    corpus = lambda: (  # noqa: E731
        data.file_corpus(texts, folders[1]) if texts else data.default_corpus(folders[1], plan.seed)
    )
    record = train(folders[0], target, folders[1], plan, corpus, resume=resume, device=where)
    if record is None:
        print(f"stopped; continue with --resume: the state is in {target}")
        return
    first, last = record["held_out"][0], record["held_out"][-1]
    print(
        f"{target}: {record['tokens']:,} tokens in {record['steps']} steps; held-out loss {first['loss']:.4f} -> "
        f"{last['loss']:.4f}, KL {first['kl']:.4f} -> {last['kl']:.4f} nats a token"
    )


def _calibration(device: str | None) -> dict[str, Any]:
    """The device that a calibration runs on, and its default texts."""
    import torch

    from kvasir.lab.calibration import default_texts

    return {"device": device or ("cuda" if torch.cuda.is_available() else "cpu"), "texts": default_texts}
