"""Tables of figures in the pages: what templates mean, and whether every page agrees with its results."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.bench.result import arm, result, spread
from kvasir.cli.commands.bench import bench
from kvasir.errors import ConfigError
from kvasir_lab.bench import pages, plots
from kvasir_lab.bench.figures import Figures

ROOT = Path(__file__).parents[2]
PAGE = "# Page\n\n<!-- figures: speed -->\n<!-- /figures -->\n\nWords.\n"
TABLES = """
[speed]
columns = ["batch", "ours", "ratio", "target"]
cells = [
  "$1",
  "{run > kvasir > $2 as ,.0f}",
  "{run > ratios > $2 kvasir/vllm as .2f}x",
  "{? run > targets > $2 kvasir/vllm as verdict}",
]
rows = [["1", "one.tok_s"], ["8", "eight.tok_s"]]

[pictures.speed]
file = "docs/img/speed.png"
title = "speed"
rows = [["1", "run > kvasir > one.tok_s > median", "run > vllm > one.tok_s > median"]]
"""


def outcome():
    arms = [
        arm("kvasir", {}, {"one.tok_s": spread([10.0, 12.0, 11.0]), "eight.tok_s": 4000.0, "failed": 0}),
        arm("vllm", {}, {"one.tok_s": spread([10.0])}),
        arm("step", {"codec": "plain"}, {"ms": 2.0, "failed": 1}),
        arm("step", {"codec": "int4", "way": "graph, shared"}, {"ms": 1.0, "by_depth": [0.5, 0.25]}),
    ]
    ratios = {"one.tok_s kvasir/vllm": 1.1, "eight.tok_s kvasir/vllm": 0.9}
    targets = {"one.tok_s kvasir/vllm": {"ratio": 1.1, "at_least": 1.15, "met": False}}
    return result("case", arms, ratios=ratios, limits={"one.tok_s": 22.0}, targets=targets)


@pytest.fixture
def root(tmp_path):
    """A small repository: one result, one page, one table and one picture."""
    for folder in ("bench/results", "bench/pages", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bench/results/run.json").write_text(json.dumps(outcome()))
    (tmp_path / "bench/pages/tables.toml").write_text(TABLES)
    (tmp_path / "README.md").write_text("# Read me\n")
    (tmp_path / "docs/page.md").write_text(PAGE)
    return tmp_path


@pytest.fixture
def figures(root):
    return Figures(root / "bench/results")


@pytest.mark.parametrize(
    "template, want",
    [
        ("{run > kvasir > one.tok_s as ,.0f}", "11"),
        ("{run > kvasir > one.tok_s > max as .1f}", "12.0"),
        ("{run > kvasir > one.tok_s / run > limits > one.tok_s as .0%}", "50 %"),
        ("{run > kvasir > one.tok_s * 2 - 1 as .0f} and {run > vllm > one.tok_s as .0f}", "21 and 10"),
        ("{run > step [codec=plain] > ms as .1f}{run > step [codec=plain] > failed as mark}", "2.0\\*"),
        ("{run > step [way=graph, shared] > by_depth > 1 as .2f}", "0.25"),
        ("{run > step [way=] > ms as .0f}", "2"),
        ("{run > targets > one.tok_s kvasir/vllm as verdict}", "MISSED: at least 1.15"),
        ("{? run > kvasir > two.tok_s as .0f}", ""),
        ("{run > kvasir > failed as mark}", ""),
    ],
)
def test_a_template_shows_its_figure(figures, template, want):
    assert figures.fill(template) == want


@pytest.mark.parametrize(
    "template, words",
    [
        ("{run > kvasir > two.tok_s as .0f}", "there is no 'two.tok_s'"),
        ("{run > sglang > one.tok_s as .0f}", "there is no arm 'sglang'"),
        ("{run > step > ms as .0f}", "any of 2 arms"),
        ("{run > kvasir > one.tok_s}", "has no format"),
        ("{other > kvasir > one.tok_s as .0f}", "cannot read the result"),
        ("{run > kvasir as .0f}", "names no figure"),
    ],
)
def test_a_figure_that_no_result_holds_is_an_error(figures, template, words):
    with pytest.raises(ConfigError, match=words):
        figures.fill(template)


def test_a_page_is_written_once_and_then_agrees(root):
    changed = pages.run(root, check=False)
    assert [f.name for f in changed] == ["page.md", "speed.png"]
    text = (root / "docs/page.md").read_text()
    assert "| 1 | 11 | 1.10x | MISSED: at least 1.15 |\n| 8 | 4,000 | 0.90x |  |\n<!-- /figures -->\n\nWords.\n" in text
    assert pages.run(root, check=True) == []


def test_the_check_notices_another_figure_in_the_page_or_in_the_result(root):
    pages.run(root, check=False)
    page = root / "docs/page.md"
    page.write_text(page.read_text().replace("4,000", "4,001"))
    assert pages.run(root, check=True) == [page]
    assert "4,001" in page.read_text(), "a check writes nothing"
    pages.run(root, check=False)
    newer = outcome()
    newer["arms"][0]["metrics"]["one.tok_s"] = spread([13.0])
    (root / "bench/results/run.json").write_text(json.dumps(newer))
    assert pages.run(root, check=True) == [page, root / "docs/img/speed.png"]


def test_a_picture_keeps_its_numbers(root, tmp_path):
    pages.run(root, check=False)
    assert json.loads(plots.stored(root / "docs/img/speed.png")) == {"title": "speed", "rows": [["1", 11.0, 10.0]]}
    first = (root / "docs/img/speed.png").read_bytes()
    shutil.rmtree(root / "docs/img")
    pages.run(root, check=False)
    assert (root / "docs/img/speed.png").read_bytes() == first, "the same numbers give the same file"


@pytest.mark.parametrize(
    "text, words",
    [
        ("<!-- figures: sped -->\n<!-- /figures -->\n", "no file defines.*speed"),
        ("<!-- figures: speed -->\n| 1 |\n", "closing comment"),
    ],
)
def test_a_page_whose_markers_do_not_fit_is_refused(root, text, words):
    (root / "docs/page.md").write_text(text)
    with pytest.raises(ConfigError, match=words):
        pages.run(root, check=True)


def test_a_row_must_fit_its_columns_and_a_name_is_used_once(root):
    figures = Figures(root / "bench/results")
    with pytest.raises(ConfigError, match="has 1 cells for 2 columns"):
        pages.table("t", {"columns": ["a", "b"], "rows": [["x"]]}, figures)
    (root / "bench/pages/more.toml").write_text('[speed]\ncolumns = ["a"]\nrows = []\n')
    with pytest.raises(ConfigError, match="once more"):
        pages.definitions(root / "bench/pages")


def test_the_command_fails_until_the_pages_are_written(root):
    command = ["pages", "--root", str(root)]
    assert CliRunner().invoke(bench.app, [*command, "--check"]).exit_code != 0
    assert CliRunner().invoke(bench.app, command).exit_code == 0
    assert CliRunner().invoke(bench.app, [*command, "--check"]).exit_code == 0


def test_every_page_of_the_repository_agrees_with_its_results():
    changed = pages.run(ROOT, check=True)
    assert not changed, f"run 'kvasir bench pages': {[str(f.relative_to(ROOT)) for f in changed]}"


def test_every_table_that_is_defined_can_be_written():
    tables, _ = pages.definitions(ROOT / pages.DEFINITIONS)
    figures = Figures(ROOT / pages.RESULTS)
    for name, definition in tables.items():
        assert pages.table(name, definition, figures).count("\n") == len(definition["rows"]) + 2
