"""``kvasir bench plot``: the curves in a result, and their pictures."""

import json
import sys

import pytest
from typer.testing import CliRunner

from kvasir.bench.result import arm, result, spread
from kvasir.cli.commands.bench import bench
from kvasir.errors import ConfigError
from kvasir_lab.bench import plots

SPEEDS = result(
    "long",
    [
        arm(
            name,
            {},
            {f"context{k}k.decode_tok_s": spread([rate / k, rate / k + 1]) for k in (32, 2, 8)} | {"start_s": 1.0},
        )
        for name, rate in (("plain", 20000.0), ("int4_bdr", 40000.0))
    ],
)


def answers(codec, size, share):
    metric = {"chain": {"exact": share, "interval": [share - 0.01, share]}, "story": {"perplexity": 3.0}}
    return arm(codec, {"outliers": size} if size else {}, metric)


QUALITY = result(
    "codecs",
    [
        answers("plain", 0, 1.0),
        answers("int4", 0, 0.9),
        answers("int8", 0, 1.0),
        answers("int4", 32, 0.0),
        answers("int4", 8, 0.25),
        answers("plain", 32, 1.0),
        arm("error of int4", {}, {"relative_squared_error_keys": 0.1}),
    ],
)


def test_curves():
    assert plots.over_context(SPEEDS)["plain"] == [
        (2.0, 10000.5, 10000.0, 10001.0),
        (8.0, 2500.5, 2500.0, 2501.0),
        (32.0, 625.5, 625.0, 626.0),
    ]
    curves = plots.over_outliers(QUALITY)
    assert set(curves) == {"plain", "int4"}, "a codec without twins has no curve"
    assert [(x, y) for x, y, *_ in curves["int4"]] == [(1.0, 90.0), (8.0, 25.0), (32.0, 0.0)]
    assert plots.over_outliers(SPEEDS) == {} == plots.over_context(QUALITY)


def test_both_pictures_with_one_command(tmp_path):
    for outcome in (SPEEDS, QUALITY):
        (tmp_path / f"{outcome['case']}.json").write_text(json.dumps(outcome))
    done = CliRunner().invoke(
        bench.app, ["plot", str(tmp_path / "long.json"), str(tmp_path / "codecs.json"), "-o", str(tmp_path / "img")]
    )
    assert done.exit_code == 0, done.exception
    drawn = sorted((tmp_path / "img").iterdir())
    assert [f.name for f in drawn] == ["codecs-outliers.png", "long.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") and f.stat().st_size < 200_000 for f in drawn)


def test_refusals(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    file.write_text(json.dumps(result("c", [arm("a", {}, {"x": 1.0})])))
    with pytest.raises(ConfigError, match="no curve in these results"):
        plots.run([file], tmp_path)
    file.write_text(json.dumps(SPEEDS))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="plots need matplotlib"):
        plots.run([file], tmp_path)
