"""Measure minutes and memory of both conversions at a model's shape, on random weights and random texts.

    python -m kvasir_lab.studies mla_conversion_cost OUT.json [--shape llama-8b] [--device cuda] [--texts 128]
        [--keep .]

``kvasir convert mla`` runs at parity and at a latent of 512, the codec's `kvasir convert lowrank` at 512 and 256 for
each side. ``--keep`` gets the folders ``latents-512`` and ``latents-256``, which bench/cases/mla-llama-8b-modes.toml
reads from the folder that it runs in. A fold of ``auto`` is a conversion for each candidate, so both are timed.
"""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch

from kvasir.bench.startup import random_checkpoint
from kvasir.convert.calibrate import NUM_TEXTS, TEXT_TOKENS, Texts
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir_lab.study import Arms, Report, study

SPECS = {
    "lowrank 512": "lowrank:rank={half}",
    "lowrank 256": "lowrank:rank={quarter}",
    "mla 512": "mla:rank={half},rope_dim={rope},fold={fold}",
    "mla parity": "mla:rank=parity,rope_dim={rope},fold={fold}",
    "mla 512, fold auto": "mla:rank={half},rope_dim={rope}",
}


def measure(spec: str, source: Path, target: Path, texts: Texts, device: str) -> dict[str, Any]:
    """Seconds, bytes and peak memory of one conversion."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    record = convert(load_converter(spec), spec, source, target, texts=lambda _: texts, device=device)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.monotonic() - start, "bytes": record["bytes"], "device_bytes": peak, "host_bytes": host}


@study("mla-conversion-{shape}")
def main(
    report: Report,
    *,
    shape: str = "llama-8b",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    texts: int = NUM_TEXTS,
    keep: Annotated[Path | None, "folder for the latents; default: they are thrown away"] = None,
) -> Arms:
    with random_checkpoint(shape) as source, tempfile.TemporaryDirectory() as home:
        config = json.loads((Path(source) / "config.json").read_text())
        random = torch.Generator().manual_seed(42)
        rows = torch.randint(config["vocab_size"], (texts + 2, TEXT_TOKENS), generator=random).tolist()
        drawn = Texts(rows[:-2], rows[-2:], "random")
        half = config["num_key_value_heads"] * config["head_dim"] // 2
        numbers = dict(half=half, quarter=half // 2, rope=config["head_dim"] // 2, fold=4)
        for name, form in SPECS.items():
            spec, target = form.format(**numbers), Path(home) / name.replace(" ", "-").replace(",", "")
            yield name, {"converter": spec, "texts": texts}, measure(spec, Path(source), target, drawn, device)
            if keep and name.startswith("lowrank"):
                shutil.move(target, keep / f"latents-{name.split()[1]}")
