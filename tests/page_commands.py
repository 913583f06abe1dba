"""The commands in the shell blocks of README.md and docs/, one string each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, kinds: str) -> list[str]:
    """The code of the fenced blocks of such a kind, e.g. ``sh|bash``."""
    return re.findall(rf"^ *```(?:{kinds})\n(.*?)^ *```$", text, re.S | re.M)


def commands(text: str) -> list[str]:
    """The commands of a shell block: comments are left out, continued lines joined, and runs of blanks are one."""
    found, held = [], ""
    for line in text.splitlines():
        held += ("\n" if held else "") + line
        kept = re.sub(r"\s+#\s.*$", "", held) if _whole(re.sub(r"\s+#\s.*$", "", held)) else held
        if kept.endswith("\\"):
            held = kept[:-1]
        elif _whole(kept):
            found.append(" ".join(kept.split()))
            held = ""
    assert not held, f"an open quotation: {held}"
    return [command for command in found if command and not command.startswith("#")]


def _whole(text: str) -> bool:
    """Whether all quotations are closed."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def of_pages() -> dict[str, list[str]]:
    """Pages that show commands -> the commands."""
    found = {str(p.relative_to(ROOT)): [c for b in blocks(p.read_text(), "sh|bash|shell|console") for c in commands(b)]
             for p in PAGES}  # fmt: skip
    return {page: listed for page, listed in found.items() if listed}
