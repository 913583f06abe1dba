"""``kvasir solve`` as a user runs it, with the smallest models of the package."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvasir.scaling.endpoint import Caps, Sampling
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.solving import ablation as solve_ablation
from kvasir_lab.solving import report as solve_report
from kvasir_lab.solving.job import Job
from tests.api.running import running
from tests.scaling.tabular import Tabular, problem


def test_two_models_a_journal_and_a_report(kvasir, tmp_path):
    out, journal = tmp_path / "out.json", tmp_path / "journal"
    args = (
        "solve",
        "--strategy",
        "majority:n=2,model=nano",
        "--strategy",
        "squeeze_evolve:N=2,K=2,T=2",
        "--model",
        "nano",
        "--model",
        "base",
        "--task",
        "countdown",
        "-n",
        3,
        "--seed",
        7,
        "--price",
        "base=1/0.1/4",
        "--device",
        "cpu",
        "--max-tokens",
        40,
        "--json",
        out,
        "--journal",
        journal,
    )
    done = kvasir(*args)
    assert done.code == 0 and "on the frontier" in done.out
    found = json.loads(out.read_text())
    first, second = (a["metrics"] for a in found["arms"])
    assert found["arms"][0]["config"]["task"] and not found["arms"][1]["config"], "all have the same"
    assert (
        first["problems"] == 3
        and first["calls"] == 3
        and first["dollars"] == 0 < second["dollars"]
        and len(second["loops"]) == 2
    )
    assert set(second["by_model"]) == {"nano", "base"} and set(found["frontier"]) >= {"tokens", "flops", "dollars"}
    assert found["differences"][0]["second"] == "squeeze_evolve:N=2,K=2,T=2"
    assert first["seconds"] > 0 and "seconds" in found["frontier"] and "device_seconds" in found["frontier"]
    assert 0 < first["by_model"]["nano"]["device_seconds"] <= first["device_seconds"] and set(second["by_model"]) == {
        "nano",
        "base",
    }
    lines = journal.read_text().count("\n")
    again = kvasir(*args)
    assert again.code == 0 and journal.read_text().count("\n") == lines  # everything was there
    repeated = json.loads(out.read_text())
    assert (
        not {"seconds", "device_seconds"} & set(repeated["arms"][0]["metrics"])
        and "seconds" not in repeated["frontier"]
    )  # a replay takes no time
    for a, b in zip(found["arms"], repeated["arms"]):
        for m in (a["metrics"], b["metrics"]):
            for part in (m, m["per_problem"], *m["by_model"].values()):
                part.pop("seconds", None), part.pop("device_seconds", None)
        assert a["metrics"] == b["metrics"]
    assert kvasir(*args[:-2], "--journal", out).code == 2


def test_what_was_through_before_a_fault_is_shown(kvasir, tmp_path, capsys):
    (tmp_path / "faulty.py").write_text(
        '"""Raises."""\nfrom kvasir.scaling.strategy import Strategy\nclass Faulty(Strategy):\n'
        "    async def run(self, context, problem):\n        raise ArithmeticError('boom')\n"
    )
    with pytest.raises(ArithmeticError) as fault:
        kvasir(
            "solve",
            "--strategy",
            "majority:n=1",
            "--strategy",
            tmp_path / "faulty.py",
            "--model",
            "nano",
            "-n",
            2,
            "--max-tokens",
            8,
        )
    assert "majority:n=1" in capsys.readouterr().out and fault.value.__notes__ == ["strategy 'faulty', problem p0"]


def test_a_pool_a_limit_and_a_page(kvasir, tmp_path):
    out, pool = tmp_path / "out.json", tmp_path / "pool"
    args = (
        "solve",
        "--model",
        "nano",
        "--task",
        "countdown",
        "-n",
        3,
        "--device",
        "cpu",
        "--max-tokens",
        40,
        "--json",
        out,
    )
    specs = ("--strategy", "majority:n=1", "--strategy", "best_of_n:n=4,by=lowest", "--strategy", "first_finish:n=4")
    drawn = kvasir(*args, *specs, "--pool", 4, "--pool-file", pool)
    assert drawn.code == 0, drawn.err
    first = json.loads(out.read_text())
    assert (
        kvasir(*args, *specs, "--pool", 4, "--pool-file", pool).code == 0
        and json.loads(out.read_text())["arms"] == first["arms"]
    )
    assert first["pool"]["nano"]["replies"] == 12 and set(first["pool"]["nano"]["pass_at"]) == {"1", "2", "4"}
    assert first["arms"][2]["metrics"]["wasted"] > 0 == first["arms"][0]["metrics"]["wasted"]
    done = kvasir(*args, *specs, "--minutes", 0)
    assert done.code == 0 and json.loads(out.read_text())["left_out"] == ["best_of_n:n=4,by=lowest", "first_finish:n=4"]
    pytest.importorskip("matplotlib")
    kvasir(*args, *specs, "--pool", 4, "--pool-file", pool)
    page = tmp_path / "page.md"
    assert kvasir("solve", "report", out, "--page", page).code == 0 and "majority:n=1" in page.read_text()
    assert kvasir("solve", "countdown").code == 2


def test_replicas_of_a_remote_model_share_the_problems(kvasir, tmp_path):
    out = tmp_path / "out.json"
    with running() as a, running() as b:
        done = kvasir(
            "solve",
            "--strategy",
            "majority:n=2",
            "--strategy",
            "best_of_n:n=2,by=judge",
            "--task",
            "countdown",
            "-n",
            4,
            "--max-tokens",
            8,
            "--model",
            f"{a.url}/v1#fake,{b.url}/v1#fake",
            "--json",
            out,
        )
        assert done.code == 0, done.err
        assert len(a.engine.seen) == len(b.engine.seen) == 2 * (2 + 4)
        problems = [{tuple(r.prompt_ids) for r in server.engine.seen} for server in (a, b)]
        assert not problems[0] & problems[1], "every call of a problem goes to one of them"
    assert list(json.loads(out.read_text())["arms"][0]["config"]["models"]) == ["fake"]
    assert kvasir("solve", "--strategy", "majority", "--model", "http://h/v1#a,http://h/v1#b").code == 2


def test_features_one_by_one(kvasir, tmp_path, monkeypatch):
    out, kept = tmp_path / "out.json", ("whole", "none of them", "http")
    monkeypatch.setattr(solve_ablation, "VARIANTS", {name: solve_ablation.VARIANTS[name] for name in kept})
    done = kvasir(
        "solve",
        "--ablate",
        "--strategy",
        "short_m_at_k:m=1,k=3",
        "--strategy",
        "best_of_n:n=2,by=self",
        "--strategy",
        "beam:N=2,width=2",
        "--model",
        "nano",
        "--task",
        "countdown",
        "-n",
        2,
        "--device",
        "cpu",
        "--batch-invariant",
        "--max-tokens",
        16,
        "--json",
        out,
    )
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    metrics = {a["name"]: a["metrics"] for a in found["arms"]}
    assert found["left_out"] == ["beam:N=2,width=2 | http"] and len(metrics) == 8
    for spec in ("short_m_at_k:m=1,k=3", "best_of_n:n=2,by=self"):
        assert metrics[f"{spec} | whole"]["same_replies"] == metrics[f"{spec} | none of them"]["same_replies"] == 1.0
        assert found["ratios"][f"uncached {spec} | none of them/{spec} | whole"] > 1
    assert metrics["best_of_n:n=2,by=self | http"]["flops"] > 0
    assert any("none of them" in line for line in solve_report.features(found))
    assert kvasir("solve", "--ablate", "--strategy", "majority", "--journal", tmp_path / "j").code == 2
    assert kvasir("solve", "--ablate", "--strategy", "majority", "--model", "http://127.0.0.1:9/v1#x").code == 2


class Forgetful(Tabular):
    """An endpoint that records the questions since it last forgot its cache."""

    def forget(self):
        self.prompts.clear()
        self.seen.clear()


def test_a_variant_is_warmed_up_on_another_problem_that_counts_nowhere():
    """The first strategy that a variant can run solves one problem to warm up; then caches are emptied, and the figures
    do not include it."""
    specs = ("self_eval_prune:n=2", "majority:n=3", "rsa:N=3,K=2,T=2")
    job, strategies = Job(specs, ("table",), "countdown", count=2), {spec: load_strategy(spec) for spec in specs}
    problems, other, sampling = (
        [problem("p0"), problem("p1", "solve more")],
        [problem("p0", "solve another")],
        Sampling(max_tokens=12),
    )

    def solved(other):
        endpoint, found, asked = Forgetful(caps=Caps(tokens=True, logprobs=True)), {spec: {} for spec in specs}, []
        read = endpoint.read
        endpoint.read = lambda prompt, *more: (asked.append(prompt.messages[-1]["content"]), read(prompt, *more))
        left = asyncio.run(
            solve_ablation._solve(job, "whole", strategies, problems, other, [endpoint], sampling, found)
        )
        assert left == ["self_eval_prune:n=2"] and endpoint.prompts.count("solve another") == 0
        return asked, {
            spec: (s["whole"].ledger.total() | {"seconds": 0}, [r.result.text for r in s["whole"].solved])
            for spec, s in found.items()
            if s
        }

    asked, found = solved(other)
    cold, plain = solved([])
    assert asked == ["solve another", *cold] and found == plain and set(found) == set(specs[1:])


@pytest.mark.parametrize(
    "args, named",
    [
        ((), "strategy"),
        (("--strategy", "majorty"), "Did you mean 'majority'"),
        (("--strategy", "majority", "--task", "nothing"), "nothing"),
        (("--strategy", "majority", "--task", "story"), "scored by loss"),
        (("--strategy", "majority", "--price", "nano=1"), "PROMPT/CACHED/GENERATED"),
        (("--strategy", "majority", "--model", "nano", "--price", "base=1/1/1"), "--price of base"),
        (("--strategy", "majority", "--model", "nano", "--model", "nano"), "give each once"),
        (("--strategy", "majority", "--budget", "euros=1"), "none of tokens"),
        (("--strategy", "majority", "--budget", "tokens=x"), "must be a number"),
        (("--strategy", "majority", "--problem-budget", "tokens=0"), "allows nothing"),
        (("--strategy", "rsa:K=9,N=9", "--model", "nano"), "more than the 8"),
        (("--strategy", "specreason", "--model", "nano"), "two models"),
        (("--strategy", "majority", "--model", "http://127.0.0.1:9/v1"), "URL#NAME"),
        (("--strategy", "majority", "-n", "0"), "-n"),
    ],
)
def test_what_is_wrong_is_named(kvasir, args, named):
    done = kvasir("solve", *args)
    assert done.code == 2 and named in done.err
