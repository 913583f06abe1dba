"""Store what training measured as one result: `kvasir_lab/studies/training_result.py OUT.json CASE FOLDER ...`.

Each FOLDER is one that ``kvasir train`` wrote, and becomes an arm named like it, from its ``training.json``. Of the
losses a line for each twentieth of the run is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir_lab.study import Arms, Report, study

LINES = 20
CONFIG = ("spec", "data", "target", "lr", "seed", "command")
METRICS = ("parameters", "steps", "tokens", "train_seconds", "total_seconds", "replies", "acceptance")


def arm_of(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The arm of one training run."""
    record = json.loads((folder / "training.json").read_text())
    history = record["history"][:: max(1, len(record["history"]) // LINES)]
    metrics = {name: record[name] for name in METRICS} | {"history": history}
    return folder.name, {name: record[name] for name in CONFIG}, metrics


@study("{case}")
def main(report: Report, case: str, folders: tuple[Path, ...]) -> Arms:
    for folder in folders:
        yield arm_of(folder)
