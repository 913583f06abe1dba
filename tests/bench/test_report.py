"""``kvasir bench report`` and ``merge``: stored results as a page, and joined runs."""

import json
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvasir.bench import report
from kvasir.bench.merge import load, merge
from kvasir.bench.result import arm, result, spread
from kvasir.errors import ConfigError
from tests.bench.test_result import STORED, check


def outcome(values, peer, **changes):
    arms = [
        arm("kvasir", {"shape": "<s>"}, {"w.decode_tok_s": spread(values), "start_s": 1.0}),
        arm("vllm", {}, {"w.decode_tok_s": spread(peer)}),
    ]
    ratio = round(spread(values)["median"] / spread(peer)["median"], 3)
    ratios = {"w.decode_tok_s kvasir/vllm": ratio, "w.decode_tok_s vllm after/before": 1.01}
    found = result(
        "c",
        arms,
        ratios=ratios,
        limits={"w.decode_tok_s": 100.0},
        targets={"w.decode_tok_s kvasir/vllm": {"ratio": ratio, "at_least": 1.5, "met": ratio >= 1.5}},
    )
    return found | {"commit": "abc1234"} | changes


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and not (v or "").startswith("#")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_stands_alone():
    text = report.page([outcome([50.0, 60.0], [50.0])])
    page = Page(text)
    assert page.tags.count("svg") == 1 and not [link for link in page.links if not link.startswith("http://www.w3.org")]
    assert "script" not in page.tags and "img" not in page.tags
    words = " ".join(page.words)
    for expected in ("MISSED: at least 1.5", "1.10x", "55 (50 to 60)", "55%", "<s>"):
        assert expected in words
    assert "decode, tokens a second" in text


def test_long_names_leave_room_for_the_bars():
    found = outcome([50.0, 60.0], [50.0])
    found["arms"][0]["name"] = "kvasir with everything compiled ahead"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.page([found])


def test_stored_results_make_a_page(tmp_path, monkeypatch):
    """Only the first plot of each number of groups and arms is drawn, since drawing takes most of the time."""
    draw, drawn = report._plot, set()

    def first_of_its_form(found, kind, groups):
        form = len(groups), len(found["arms"])
        new = form not in drawn
        drawn.add(form)
        return draw(found, kind, groups) if new else "<svg></svg>"

    monkeypatch.setattr(report, "_plot", first_of_its_form)
    out = tmp_path / "r.html"
    report.run(STORED, out)
    page = Page(out.read_text())
    assert page.tags.count("h2") == len(STORED) and page.tags.count("svg") > len(drawn) > 3


def test_a_file_that_is_no_result(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a result of kvasir bench"):
        report.run([tmp_path / "a.json"], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="cannot read the result"):
        report.run([tmp_path / "no.json"], tmp_path / "r.html")


def test_the_page_needs_matplotlib(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report.page([outcome([1.0], [1.0])])


def test_merged_runs_judge_anew(tmp_path):
    found = merge([outcome([50.0], [50.0]), outcome([90.0, 100.0], [60.0], limits={"x": 1.0})])
    check(found)
    kvasir, vllm = found["arms"]
    assert kvasir["metrics"]["w.decode_tok_s"] == spread([50.0, 90.0, 100.0]) and vllm["metrics"][
        "w.decode_tok_s"
    ] == spread([50.0, 60.0])
    assert kvasir["metrics"]["start_s"] == spread([1.0, 1.0])
    assert found["ratios"] == {"w.decode_tok_s kvasir/vllm": 1.636, "w.decode_tok_s vllm after/before": 1.01}
    assert found["targets"] == {"w.decode_tok_s kvasir/vllm": {"ratio": 1.636, "at_least": 1.5, "met": True}}
    assert found["limits"] == {"w.decode_tok_s": 100.0, "x": 1.0}


def test_different_cases_do_not_merge():
    for key in ("case", "machine", "commit"):
        with pytest.raises(ConfigError, match=f"differ in their {key}"):
            merge([outcome([1.0], [1.0]), outcome([1.0], [1.0]) | {key: "another"}])


def test_on_the_command_line(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from kvasir.cli.commands.bench import bench

    for name in "ab":
        (tmp_path / name).write_text(json.dumps(outcome([1.0], [1.0])))
    done = CliRunner().invoke(
        bench.app, ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "m.json")]
    )
    assert done.exit_code == 0 and load(tmp_path / "m.json")["arms"][0]["metrics"]["w.decode_tok_s"]["n"] == 2
    done = CliRunner().invoke(bench.app, ["report", str(tmp_path / "m.json"), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0 and Path(tmp_path / "r.html").read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(bench.app, ["report", str(tmp_path / "m.json"), "-o", str(tmp_path / "r.pdf")])
    assert isinstance(done.exception, ConfigError)
