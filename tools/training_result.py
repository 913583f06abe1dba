"""Store what training measured as one result: `tools/training_result.py OUT.json CASE FOLDER ...`.

Each FOLDER is one that ``kvasir train`` wrote, and becomes an arm named like it, from its ``training.json``. Of the
losses a line for each twentieth of the run is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvasir.bench.result import arm, result, write_json

LINES = 20
CONFIG = ("spec", "data", "target", "lr", "seed", "command")
METRICS = ("parameters", "steps", "tokens", "train_seconds", "total_seconds", "replies", "acceptance")


def arm_of(folder: Path) -> dict[str, Any]:
    """The arm of one training run."""
    record = json.loads((folder / "training.json").read_text())
    history = record["history"][:: max(1, len(record["history"]) // LINES)]
    metrics = {name: record[name] for name in METRICS} | {"history": history}
    return arm(folder.name, {name: record[name] for name in CONFIG}, metrics)


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    out, case, *folders = sys.argv[1:]
    write_json(Path(out), result(case, [arm_of(Path(folder)) for folder in folders]))


if __name__ == "__main__":
    main()
