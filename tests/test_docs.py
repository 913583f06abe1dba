"""Rules for the pages: links that exist, a short README whose code runs, and paragraphs that people read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_LINES = 100
MAX_README_FIGURES = 10
# Words of a paragraph of any page.
MAX_WORDS = 80
MAX_COLUMNS = 120
# Pages of entries, which are as long as they must be.
RECORDS = {"log.md", "measurements.md", "tuning.md"}


@pytest.mark.parametrize("file", DOCS, ids=lambda f: f.name)
def test_links_and_paths_in_docs_exist(file):
    text = file.read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
    for path in re.findall(r"`((?:src|packages|tests|tools|docs|bench)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{file.name} names {path}"


def anchors(page: Path) -> set[str]:
    """Anchors of a page: those of its headings, as GitHub makes them, and those that it sets itself."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    named = set(re.findall(r'<a id="([\w-]+)"></a>', text))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", DOCS, ids=lambda f: f.name)
def test_links_point_to_headings_that_exist(file):
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", file.read_text()):
        page = file.parent / target if target else file
        if page.suffix == ".md":
            assert anchor in anchors(page), f"{file.name} links to {target}#{anchor}"


def prose(text: str) -> list[list[str]]:
    """Paragraphs and items of lists, each as its lines. Tables, code, headings and comments are left out."""
    found, paragraph, fenced = [], [], False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        other = fence or fenced or not line.strip() or line.lstrip().startswith(("|", "#", "<!--", "!["))
        code = line.startswith("    ") and not paragraph
        if paragraph and (other or re.match(r"\s*([-*]|\d+\.) ", line)):
            found.append(paragraph)
            paragraph = []
        if not other and not code:
            paragraph.append(line)
    return found


def too_long(text: str, most: int) -> list[str]:
    """Beginnings of the paragraphs that have more than ``most`` words."""
    return [p[0][:60] for p in prose(text) if len(" ".join(p).split()) > most]


def test_readme_is_short_and_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_README_LINES
    assert not too_long(text, MAX_WORDS)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert 3 <= len(rows) <= 2 + MAX_README_FIGURES, "one table, of a header and at most ten figures"
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize("file", [f for f in DOCS if f.name not in RECORDS], ids=lambda f: f.name)
def test_pages_are_readable(file):
    text = file.read_text()
    assert not too_long(text, MAX_WORDS)
    wide = [line for paragraph in prose(text) for line in paragraph if len(line) > MAX_COLUMNS]
    assert not wide, f"wrap at {MAX_COLUMNS} columns"


def test_long_paragraphs_are_found():
    """The checks can fail, and a paragraph is recognised next to lists, tables, code and headings."""
    text = "one two\n\n- three four five\n- six\n\n| a b c d |\n\n```\nx y z a b\n```\n# a b c d\nseven eight\nnine ten"
    assert [" ".join(p) for p in prose(text)] == ["one two", "- three four five", "- six", "seven eight nine ten"]
    assert too_long(text, 3) == ["- three four five", "seven eight"] and not too_long(text, 4)


def test_readme_api_lines_run():
    """The Python code of the README runs as it stands."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
