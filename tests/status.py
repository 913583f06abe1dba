"""The page on what is built of each method: ``python -m tests.status`` makes docs/methods/status.md of status.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from kvasir.attention.backend import BACKENDS
from kvasir.convert.converter import PACKAGE as CONVERTERS
from kvasir.engine.pages.eviction import EVICTIONS
from kvasir.engine.schedule.policy import POLICIES
from kvasir.kv.codec import CODECS
from kvasir.kv.policy import POLICIES as KV_POLICIES
from kvasir.kv.tier import TIERS
from kvasir.layers.product_backend import BACKENDS as PRODUCT_BACKENDS
from kvasir.layers.recurrence_backend import RECURRENCES
from kvasir.layers.weight_format import PACKAGE as FORMATS
from kvasir.scaling.strategy import STRATEGIES
from kvasir.speculation.drafter import DRAFTERS
from kvasir.technique import own

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "methods" / "status.md"
SOURCE = PAGE.with_suffix(".toml")
FIELDS = {"method", "paper", "published", "differs", "exact", "result", "when"}
# Folder -> heading, and the seam whose files need an entry each; None: methods without a file of their own.
GROUPS: dict[str, tuple[str, str | None]] = {
    "drafters": ("Drafters", DRAFTERS),
    "codecs": ("KV codecs", CODECS),
    "policies": ("KV policies", KV_POLICIES),
    "tiers": ("KV tiers", TIERS),
    "formats": ("Weight formats", FORMATS),
    "strategies": ("Test-time scaling", STRATEGIES),
    "schedulers": ("Scheduling policies", POLICIES),
    "evictions": ("Eviction of cached prefixes", EVICTIONS),
    "backends": ("Attention backends", BACKENDS),
    "product_backends": ("Product backends", PRODUCT_BACKENDS),
    "recurrences": ("Recurrence backends", RECURRENCES),
    "converters": ("Converters", CONVERTERS),
    "rules": ("Rules of the sampler and the controller", None),
    "kernels": ("Kernels of note", None),
    "serving": ("Serving", None),
}
HEAD = """# What is built of each method

`python -m tests.status` writes this page from `status.toml`; `tests/test_status.py` holds that every technique has a
row, and that the tests and results it names exist. A paper is an arXiv number. A method that loses keeps its row. What
works with what is on [another page](composition.md).
"""
COLUMNS = ("name", "method, paper", "as published", "what differs", "tests", "results", "when to use it")
ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")


def entries() -> dict[str, dict[str, Any]]:
    """The rows by FOLDER/NAME."""
    return tomllib.loads(SOURCE.read_text())


def needed() -> set[str]:
    """FOLDER/NAME of every technique in the package that is a method."""
    return {f"{folder}/{name}" for folder, (_, seam) in GROUPS.items() if seam is not None for name in own(seam)}


def faults(rows: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the rows: techniques without one, rows without a technique, tests and results that do not
    exist."""
    found = [f"{key} has no row" for key in sorted(needed() - set(rows))]
    for key, row in rows.items():
        folder = key.partition("/")[0]
        if folder not in GROUPS:
            found.append(f"{key}: there is no group {folder}")
        elif GROUPS[folder][1] is not None and key not in needed():
            found.append(f"{key} is no technique")
        if set(row) != FIELDS or not row["exact"]:
            found.append(f"{key} needs {', '.join(sorted(FIELDS))}, and one test at least")
            continue
        for name in row["exact"]:
            file, _, test = name.partition("::")
            path = ROOT / "tests" / file
            if not path.is_file() or test and f"\ndef {test}(" not in path.read_text():
                found.append(f"{key}: there is no test {name}")
        found += [
            f"{key}: there is no result {name}"
            for name in row["result"]
            if not (ROOT / "bench" / "results" / f"{name}.json").is_file()
        ]
    return found


def page() -> str:
    """The page as it should be."""
    rows, parts = entries(), [HEAD]
    for folder, (heading, _) in GROUPS.items():
        parts.append(f"\n## {heading}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
        parts += [_line(key, row) for key, row in rows.items() if key.startswith(f"{folder}/")]
    return "".join(parts)


def _line(key: str, row: dict[str, Any]) -> str:
    paper = ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", row["paper"])
    tests = [name.partition("::")[0] for name in row["exact"]]
    cells = (
        f"`{key.partition('/')[2]}`",
        row["method"] + ("" if paper == "none" else f" ({paper})"),
        row["published"],
        row["differs"],
        ", ".join(f"[{Path(name).stem}](../../tests/{name})" for name in dict.fromkeys(tests)),
        ", ".join(f"[{name}](../../bench/results/{name}.json)" for name in row["result"]) or "none stored",
        row["when"],
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Write the page. Exits with the faults where a row is invalid, and leaves the page as it is."""
    if wrong := faults(entries()):
        raise SystemExit(f"{SOURCE.name} is invalid, so the page is left as it is:\n" + "\n".join(wrong))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
