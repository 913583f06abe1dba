"""The frame of studies: arguments from parameters, a result after every arm, and one line for what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

from kvasir.errors import ConfigError
from kvasir_lab import study as frame
from kvasir_lab.studies import __main__ as command
from kvasir_lab.study import Arms, Report, Study, study

SIZES = {"small": 1, "large": 2}


@study("counts-{model}")
def main(
    report: Report,
    file: Path,
    *,
    model: str = "base",
    size: Annotated[str, SIZES, "of the model"] = "small",
    n: Annotated[int, "-n", "problems, 100 % of them"] = 4,
    rates: tuple[float, ...] = (0.5, 1.0),
    kind: Literal["a", "b"] | None = None,
    quick: bool = False,
    fail: bool = False,
) -> Arms:
    report.more["ratios"] = {"x a/b": 1.0}
    for rate in rates:
        yield f"rate {rate:g}", {"file": file.name, "size": size, "kind": kind, "quick": quick}, {"n": n}
        if fail:
            raise ConfigError("no time is left")


@pytest.fixture(autouse=True)
def argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["python"])


def stored(out: Path) -> dict:
    return json.loads(out.read_text())


def test_parameters_become_arguments_and_arms_a_result(tmp_path, capsys):
    out = tmp_path / "a" / "r.json"
    assert main([str(out), "in.txt", "--model", "./x/nano", "--commit", "abc", "-n", "7", "--size", "large"]) == 0
    found = stored(out)
    assert found["case"] == "counts-nano" and found["commit"] == "abc" and found["machine"]
    assert [a["name"] for a in found["arms"]] == ["rate 0.5", "rate 1"] and found["ratios"] == {"x a/b": 1.0}
    assert found["arms"][0]["config"] == {"file": "in.txt", "size": "large", "kind": None, "quick": False}
    assert found["arms"][1]["metrics"] == {"n": 7}
    assert found["command"].startswith("python -m kvasir_lab.studies test_study ")
    assert "rate 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--rates", "2", "3"], ["--rates", "2", "--rates", "3"]])
def test_several_values_stand_behind_one_flag_or_one_each(given, tmp_path):
    assert main([str(tmp_path / "r"), "in", "--quick", "--kind", "b", *given]) == 0
    arms = stored(tmp_path / "r")["arms"]
    assert [a["name"] for a in arms] == ["rate 2", "rate 3"] and arms[0]["config"]["quick"]
    assert main([str(tmp_path / "r"), "in"]) == 0
    assert [a["name"] for a in stored(tmp_path / "r")["arms"]] == ["rate 0.5", "rate 1"], "defaults come back"


@pytest.mark.parametrize("given", [["--size", "huge"], ["--kind", "c"], ["-n", "x"], ["--other"]])
def test_what_is_no_argument_is_refused(given, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "r"), "in", *given])
    assert ended.value.code == 2 and not (tmp_path / "r").exists()


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(frame.signal, "signal", lambda *_: None)
    out = tmp_path / "r"
    assert frame.run(main, [str(out), "in", "--fail"]) == 2
    assert capsys.readouterr().err.endswith("error: no time is left\n")
    assert [a["name"] for a in stored(out)["arms"]] == ["rate 0.5"]


def test_without_a_file_the_result_is_printed(capsys):
    assert main.parser().parse_args(["r.json", "in"]).output == Path("r.json")
    report = Report("c", main.parser().parse_args(["r.json", "in"]))
    report.output = None
    report.add("one", {}, {"n": 1})
    assert report.before == [] and report.result()["arms"][0]["name"] == "one"


def test_every_study_is_listed_and_shows_its_arguments():
    names = command.described()
    assert len(names) > 45 and all(line.rstrip().endswith((".", ":")) or len(line) > 30 for line in names.values())
    code = (
        "import importlib, sys\n"
        "from kvasir_lab.study import Study\n"
        "for name in sys.argv[1:]:\n"
        "    main = importlib.import_module(f'kvasir_lab.studies.{name}').main\n"
        "    if isinstance(main, Study): main.parser().format_help(); print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 35


def test_an_unknown_study_gets_the_list(capsys):
    assert command.main(["no_such"]) == 2 and "tree_study" in capsys.readouterr().out
    assert command.main(["--list"]) == 0


def test_the_frame_is_a_study():
    assert isinstance(main, Study) and main.name == "test_study"
