"""The study of logit processors: its arms, its comparisons, and that a run goes on where it was cut."""

from __future__ import annotations

import json

import pytest

from kvasir.errors import ConfigError
from kvasir_lab.studies import reflection_study as study


def test_the_arms_are_those_of_the_method_and_its_controls():
    planned = study.arms("1|2|3")
    names = [one.name for one in planned]
    assert len(set(names)) == len(names) and names[0] == "plain"
    assert sum(name.startswith("s1") for name in names) == 12
    for one in planned:
        assert set(one.control) <= set(names)
        if one.name.startswith("cyclic"):
            amplitude = float(one.name.split("A=")[1].split()[0])
            assert one.control == (f"constant +{amplitude / 2:g}", f"constant -{amplitude / 2:g}")


def rows(bits: str) -> dict:
    return {"right": {"1": bits}, "tokens": {"1": [10] * len(bits)}, "tally": {}, "cut": 0}


@pytest.mark.parametrize("method, beats", [("1" * 100, True), ("10" * 50, False), ("0" * 100, False)])
def test_an_arm_beats_the_constant_only_by_its_interval_over_both_signs(method, beats):
    planned = [
        study.Arm("plain"),
        study.Arm("constant +1"),
        study.Arm("constant -1"),
        study.Arm("wave", ("x",), ("constant +1", "constant -1")),
    ]
    given = {"plain": "0" * 100, "constant +1": "10" * 50, "constant -1": "0" * 100, "wave": method}
    cells = {("base", "reflect", 0, name): rows(bits) for name, bits in given.items()}
    wave = study.summed(cells, planned, 3)[-1]
    assert wave["name"] == "base reflect: wave" and wave["metrics"]["beats_constant"] is beats
    assert wave["metrics"]["E3"] == pytest.approx(wave["metrics"]["accuracy"] ** 2 / 10)


def test_a_vote_counts_answers():
    from kvasir_lab.lookup import load_task

    texts = ["none", "Answer: 3", "x\nAnswer: 5", "y\nAnswer: 5"]
    assert study.vote(load_task("chain"), texts) == texts[2] and study.vote(load_task("chain"), texts[:1]) == "none"


def test_a_run_goes_on_where_it_was_cut(tmp_path, capsys):
    out = tmp_path / "out.json"
    base = [str(out), "--model", "nano", "--twin", "none", "--problems", "2", "--seeds", "1", "--tasks", "countdown"]
    base += ["--device", "cpu", "--arms", "plain,s1 budget=32 ignore=1"]
    study.main([*base, "--minutes", "5", "--arms", "plain"])
    assert json.loads(out.read_text())["cells"] == {"done": 1, "left": 0}
    study.main([*base, "--minutes", "5"])
    assert capsys.readouterr().out.count("seed 0") == 2, "one cell each"
    found = json.loads(out.read_text())
    assert found["cells"] == {"done": 2, "left": 0}
    s1 = next(a for a in found["arms"] if "s1" in a["name"])
    assert "over plain" in s1["metrics"]
    with pytest.raises(ConfigError, match="--problems"):
        study.main([*base, "--problems", "3"])
