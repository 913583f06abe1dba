"""``kvasir bench pages``: the tables of figures in README and docs, written from the results, so that they cannot go
stale.

A table stands in a page between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``. ``bench/pages/*.toml`` define the
tables: ``columns`` are the titles, ``rows`` the cells. With ``cells``, one template a column, a row holds the words
that replace ``$1``, ``$2``, ... in the templates. Placeholders in cells are filled in by ``figures.py``. A table under
``pictures`` is drawn as a PNG instead, which keeps its numbers in its metadata: a check compares these, not pixels.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, nearest
from kvasir.plain_files import refuse_special
from kvasir_lab.bench import plots
from kvasir_lab.bench.figures import Figures

DEFINITIONS, RESULTS = Path("bench/pages"), Path("bench/results")
_BLOCK = re.compile(r"^<!-- figures: (?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- /figures -->$", re.MULTILINE | re.DOTALL)
_OPENING = re.compile(r"^<!-- figures:", re.MULTILINE)


def run(root: Path, *, check: bool) -> list[Path]:
    """Write the pages and pictures of the repository ``root`` that differ from its results, and return their paths.

    With ``check`` nothing is written. Raises ConfigError for a definition, a page or a figure that does not fit.
    """
    tables, pictures = definitions(root / DEFINITIONS)
    figures = Figures(root / RESULTS)
    changed = []
    for page in pages(root):
        text = page.read_text()
        fresh = rendered(text, tables, figures, page.name)
        if fresh != text:
            changed.append(page)
            if not check:
                page.write_text(fresh)
    for picture in pictures.values():
        file, rows = root / picture["file"], _bars(picture, figures)
        data = json.dumps({"title": picture["title"], "rows": rows})
        if not file.exists() or plots.stored(file) != data:
            changed.append(file)
            if not check:
                file.parent.mkdir(parents=True, exist_ok=True)
                plots.draw_bars(file, picture["title"], rows, data)
    return changed


def pages(root: Path) -> list[Path]:
    """README and the pages under ``docs/``."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def definitions(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The tables and the pictures that the files of ``folder`` define, by name.

    Raises ConfigError where two files define the same table.
    """
    tables: dict[str, dict[str, Any]] = {}
    pictures: dict[str, dict[str, Any]] = {}
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"no tables are defined in {folder}; run this in the root of the repository")
    for file in files:
        refuse_special(file)
        try:
            found = tomllib.loads(file.read_text())
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"{file} is not TOML: {e}") from e
        pictures |= found.pop("pictures", {})
        if twice := set(found) & set(tables):
            raise ConfigError(f"{file} defines the table '{twice.pop()}' once more")
        tables |= found
    return tables, pictures


def rendered(text: str, tables: dict[str, dict[str, Any]], figures: Figures, page: str) -> str:
    """Write every table of figures in ``text`` from its results."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in tables:
            raise ConfigError(f"{page} shows the table '{name}', which no file defines.{nearest(name, tables)}")
        return f"<!-- figures: {name} -->\n{table(name, tables[name], figures)}<!-- /figures -->"

    fresh, count = _BLOCK.subn(block, text)
    if count != len(_OPENING.findall(text)):
        raise ConfigError(f"{page}: a table of figures needs its opening and its closing comment on lines of their own")
    return fresh


def table(name: str, definition: dict[str, Any], figures: Figures) -> str:
    """A Markdown table. Raises ConfigError where a row does not fit its columns."""
    columns, templates = definition["columns"], definition.get("cells")
    if templates and len(templates) != len(columns):
        raise ConfigError(f"table '{name}' has {len(columns)} columns and {len(templates)} cells")
    lines = [columns, ["---"] * len(columns)]
    for row in definition["rows"]:
        cells = [_with_words(template, row) for template in templates] if templates else row
        if len(cells) != len(columns):
            raise ConfigError(f"table '{name}': the row {row[0]!r} has {len(cells)} cells for {len(columns)} columns")
        lines.append([figures.fill(cell) for cell in cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _with_words(template: str, words: list[str]) -> str:
    """Replace ``$1``, ``$2``, ... in ``template`` by the words of a row."""
    return re.sub(r"\$(\d)", lambda found: words[int(found[1]) - 1], template)


def _bars(picture: dict[str, Any], figures: Figures) -> list[list[Any]]:
    """Rows of a picture: the label, our figure and the peer's, to one decimal."""
    return [
        [label, *(round(float(figures.value(expression)), 1) for expression in both)]
        for label, *both in ([row[0], *row[1:]] for row in picture["rows"])
    ]
