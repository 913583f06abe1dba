"""The page of a solve study: it says what follows from the file, and nothing else."""

from __future__ import annotations

import json

import pytest

from kvasir.errors import ConfigError
from kvasir_lab.solving import report as solve_report
from kvasir_lab.solving.pooled import MISSING, pooled

pytest.importorskip("matplotlib")
PLAIN, SHUFFLED, LARGE, SMALL = (
    "squeeze_evolve:N=8,K=3,T=4,p=25",
    "squeeze_evolve:N=8,K=3,T=4,p=25,fitness=shuffled",
    "rsa:N=8,K=3,T=4,model=base",
    "rsa:N=8,K=3,T=4,model=nano",
)


def arm(name, right, flops, tokens, seconds, nano=0.0):
    exact = sum(right) / len(right)
    each = {"flops": flops, "output_tokens": tokens, "tokens": 2 * tokens, "dollars": 0.0, "seconds": seconds}
    by_model = {m: {"output_tokens": share * tokens} for m, share in (("nano", nano), ("base", 1 - nano)) if share}
    metrics = {
        "exact": exact,
        "interval": [max(0, exact - 0.1), min(1, exact + 0.1)],
        "wasted": 0.1,
        "per_problem": each,
        "by_model": by_model,
        "output_tokens": tokens * len(right),
        "seconds": seconds * len(right),
    }
    config = {
        "task": "countdown",
        "n": len(right),
        "seed": 7,
        "split": "test",
        "temperature": 1.0,
        "models": {"nano": {"active_parameters": 100}, "base": {"active_parameters": 600}},
    }
    return {"name": name, "config": config, "metrics": metrics}


@pytest.fixture
def found():
    n = 40
    marks = {
        name: [i < right for i in range(n)] for name, right in ((LARGE, 30), (PLAIN, 28), (SHUFFLED, 28), (SMALL, 8))
    }
    arms = [
        arm(LARGE, marks[LARGE], 9e9, 800, 4.0),
        arm(PLAIN, marks[PLAIN], 4e9, 800, 2.0, 0.5),
        arm(SHUFFLED, marks[SHUFFLED], 4.5e9, 800, 2.0, 0.5),
        arm(SMALL, marks[SMALL], 5e9, 800, 1.0, 1.0),
    ]
    from kvasir.scaling.report import frontier

    named = [(a["name"], a["metrics"]) for a in arms]
    return {
        "case": "solve-countdown",
        "machine": "a machine",
        "commit": "abc",
        "date": "today",
        "arms": arms,
        "frontier": {c: frontier(named, c) for c in ("flops", "output_tokens", "seconds")},
        "left_out": ["v1:N=8"],
        "right": {name: "".join(str(int(x)) for x in m) for name, m in marks.items()},
        "pool": {
            "nano": {
                "replies": 9,
                "pass_at": {"1": 0.3},
                "auc": {"confidence": 0.8, "short": 0.51},
                "tokens": {"right": 3.0, "wrong": 4.0},
            }
        },
    }


def test_the_page(found, tmp_path):
    file, page = tmp_path / "evolve.json", tmp_path / "report.md"
    file.write_text(json.dumps(found))
    solve_report.run([file], page)
    text = page.read_text()
    picture = tmp_path / "report-0-evolve.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and f"({picture.name})" in text
    assert (
        f"**`{PLAIN}`** | 70.0 (60.0-80.0)" in text
        and f"| 2 | `{SHUFFLED}` |" in text
        and "| 0.50 | nano 50%, base 50% |" in text
    )
    assert "Left out for want of time: `v1:N=8`." in text and "pass@1 30.0 %" in text


def test_controls_are_paired(found):
    [line] = solve_report.controls(found)
    # No problem differs; the interval is what 40 problems cannot exclude.
    assert line == f"- `{PLAIN}` minus `{SHUFFLED}`: +0.0 points (-8.8 to +8.8)"
    assert (
        solve_report.plain_of(SHUFFLED) == PLAIN
        and solve_report.plain_of("squeeze_evolve:route=random") == "squeeze_evolve"
    )


def test_the_bound_is_that_of_the_share_of_the_large_model(found):
    lines = solve_report.bounds(found)
    # phi = (8 + 3 * 8 * 0.25) / 32 = 0.4375; tokens a second 800 / 1 against 800 / 4: r1 / r2 = 4.
    assert (
        f"at most {1 / (0.4375 + 0.5625 / 4):.2f}x by phi = 0.44 and a cheap model 4.0x as fast (measured)" in lines[0]
    )
    assert "cheaper by 2.25x in flops, 2.00x in seconds" in lines[0] and "-5.0 points" in lines[0]
    for a in found["arms"]:
        a["metrics"]["seconds"] = None
    assert "6.0x as fast (by parameters)" in solve_report.bounds(found)[0]


def test_what_did_not_pay_is_said(found):
    said = "\n".join(solve_report.failures(found))
    assert f"`{SMALL}`: `{SHUFFLED}` costs no more" in said or f"`{SMALL}`: `{PLAIN}` costs no more" in said
    assert (
        f"The signal of `{PLAIN}` is not shown to beat its control" in said
        and "`short` does not tell right replies" in said
    )
    assert "`confidence` does not" not in said and f"- `{LARGE}`" not in said


def test_other_files_are_refused(found, tmp_path):
    with pytest.raises(ConfigError, match="name the JSON"):
        solve_report.run([], tmp_path / "x.md")
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"case": "llama", "arms": []}))
    with pytest.raises(ConfigError, match="not of kvasir solve"):
        solve_report.run([file], tmp_path / "x.md")


def seeded(found, seed, task="countdown"):
    copy = json.loads(json.dumps(found))
    for a in copy["arms"]:
        a["config"] |= {"seed": seed, "task": task}
        a["metrics"] |= {"problems": 40, "right": int(40 * a["metrics"]["exact"])}
    return copy


def test_seeds_stand_together(found):
    """Pooled pairs have the same seed and problem. Strategies that occur twice, and other tasks, are refused."""
    first, second = seeded(found, 7), seeded(found, 8)
    second["arms"] = second["arms"][:2]  # only LARGE and PLAIN
    second["right"] = {LARGE: "1" * 40, PLAIN: "0" * 40}
    second["arms"][0]["metrics"] |= {"right": 40, "exact": 1.0}
    second["arms"][1]["metrics"] |= {"right": 0, "exact": 0.0}
    second["arms"][1]["config"] = {}  # stored results keep shared settings only in the first arm
    both = pooled([second, first])
    metrics = {a["name"]: a["metrics"] for a in both["arms"]}
    assert metrics[LARGE]["right"] == 70 and metrics[LARGE]["problems"] == 80 and metrics[SHUFFLED]["problems"] == 40
    assert (
        both["right"][SHUFFLED] == found["right"][SHUFFLED] + MISSING * 40
        and both["right"][PLAIN] == found["right"][PLAIN] + "0" * 40
    )
    assert solve_report.difference(both, LARGE, PLAIN)[0] == (28 - 30 - 40) / 80
    assert solve_report.difference(both, SHUFFLED, PLAIN)[0] == 0, "on the seed that both ran"
    last = solve_report.bought(found)[-1]
    assert last.startswith(f"- `{LARGE}` minus `{PLAIN}`: +5.0 points") and "2.25x the cost" in last
    rows = solve_report.pairs(found)  # cheapest first: PLAIN, SHUFFLED, SMALL, LARGE
    assert (
        rows[2].startswith("| 2 | +0.0 (-8.8 to +8.8) |")
        and rows[4].startswith("| 4 | +5.0 (")
        and len({row.count("|") for row in rows}) == 1
    )
    assert not solve_report.pairs(found | {"right": {}})
    for wrong in (seeded(found, 7), seeded(found, 9, task="path")):
        with pytest.raises(ConfigError, match="--together"):
            pooled([first, wrong])


def test_runs_of_several_machines_stand_together_without_their_times(found):
    here, there = seeded(found, 7), seeded(found, 8) | {"machine": "another"}
    one, both = pooled([here]), pooled([here, there])
    assert both["machine"] == f"{found['machine']} and another" and one["machine"] == found["machine"]
    assert both["arms"][0]["metrics"]["problems"] == 80 and both["frontier"]["flops"]
    assert all(
        a["metrics"]["per_problem"].keys() >= {"flops"} and "seconds" not in a["metrics"]["per_problem"]
        for a in both["arms"]
    )
    assert "seconds" not in both["arms"][0]["metrics"] and "seconds" in one["arms"][0]["metrics"]
