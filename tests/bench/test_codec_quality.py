"""The study of codecs with stand-ins for engines: its order, its pairing and its time limit."""

import argparse
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from kvasir.bench.result import arm, result
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir_lab import paired_quality
from kvasir_lab.bench import codec_quality
from kvasir_lab.bench.codec_quality import Job, Study, beginning, first, jobs, pooled, row_errors, task_specs, verdicts
from kvasir_lab.evaluation.evaluator import Answers, Losses, read_tokenizer
from kvasir_lab.studies import rounding_quality, ssa_quality
from kvasir_lab.study import Report
from tests.bench.test_result import check

NANO = checkpoint.resolve("nano")
# Problems of an exam that a codec gets wrong.
WRONG = {"plain": 0, "int4_bdr": 1, "int4": 4, "nvfp4": 2}


@pytest.fixture
def study(monkeypatch):
    """A study in which a codec answers its own share of problems right, and an exam takes one second."""
    clock = SimpleNamespace(now=0.0, asked=[])
    monkeypatch.setattr(codec_quality.time, "monotonic", lambda: clock.now)

    @contextlib.contextmanager
    def engine(config):
        if config.cache.kv_codec == "fp8":
            raise ConfigError("no such kernel here")
        codec = SimpleNamespace(fuses=config.cache.kv_codec != "nvfp4")
        yield SimpleNamespace(
            config=config, engine=SimpleNamespace(runner=SimpleNamespace(pool=SimpleNamespace(codec=codec)))
        )

    def put(llm, exam, plan, tokenizer):
        clock.now += 1
        codec, count = llm.config.cache.kv_codec, len(exam.prompts)
        clock.asked.append((codec, exam.spec, plan.seed, count))
        if exam.trained is not None:
            return Losses(exam, np.full(count, 10.0 + WRONG[codec]), np.full(count, 5), np.full(count, 9), 1.0)
        right = np.arange(count)[:, None] >= WRONG[codec]
        return Answers(exam, right, np.full((count, 1), 7), [["1"]] * count, 0, 1.0, [["Answer: 1"]] * count)

    monkeypatch.setattr(codec_quality, "engine", engine)
    monkeypatch.setattr(codec_quality, "put", put)
    made = Study(NANO, read_tokenizer(NANO), lambda size: NANO, "cuda", 8, 1e9)
    made.clock = clock
    return made


def test_seeds_are_pooled_and_paired_to_the_plain_cache(study):
    kept = []
    codec_quality.answer(
        study, [Job(codec, 0, ("chain", "story"), (1, 2)) for codec in ("plain", "fp8", "int4")], kept.append
    )
    check(result("c", kept[-1]))
    plain, int4 = kept[-1]
    assert (plain["name"], int4["name"]) == ("plain", "int4"), "a codec that cannot run costs its own arm only"
    chain = plain["metrics"]["chain"]
    assert chain["problems"] == 16 and chain["seeds"] == [1, 2] and "against_plain" not in chain
    chain = int4["metrics"]["chain"]
    assert (
        chain["exact"] == 0.5
        and chain["against_plain"]["only_first"] == 8
        and chain["against_plain"]["difference"] == -0.5
    )
    story = int4["metrics"]["story"]
    assert story["documents"] == 8 and story["seeds"] == [1], "prose is drawn once"
    assert story["against_plain"]["difference"] == pytest.approx(4 / np.log(2) / 9)


def test_needles_are_told_apart_by_length_and_depth(study):
    kept = []
    codec_quality.answer(study, [Job(codec, 0, ("needle",), (1,)) for codec in ("plain", "int4_bdr")], kept.append)
    metrics = kept[-1][1]["metrics"]
    assert len(metrics) == 13 and metrics["needle"]["problems"] == 12 and metrics["needle"]["exact"] == 0
    assert all(m["against_plain"]["problems"] == m["problems"] for m in metrics.values())


def test_a_task_with_too_few_problems_is_left_out(study):
    kept = []
    study.count = 40
    codec_quality.answer(study, [Job("plain", 0, ("story:form=prose,length=8192", "chain"), (1,))], kept.append)
    assert list(kept[-1][0]["metrics"]) == ["chain"]


def test_a_codec_without_a_kernel_gets_fewer_problems(study, monkeypatch):
    monkeypatch.setattr(codec_quality, "SLOW", 3)
    kept = []
    codec_quality.answer(study, [Job(codec, 0, ("chain",), (1,)) for codec in ("plain", "nvfp4")], kept.append)
    chain = kept[-1][1]["metrics"]["chain"]
    assert chain["problems"] == chain["against_plain"]["problems"] == 3 and chain["against_plain"]["only_first"] == 2


def test_the_clock_ends_the_list_and_keeps_what_was_measured(study):
    study.limit = 3.5
    kept = []
    codec_quality.answer(
        study,
        [Job("plain", 0, ("chain",), (1, 2)), Job("int4", 0, ("chain",), (1, 2)), Job("int4_bdr", 0, ("chain",), (1,))],
        kept.append,
    )
    assert [a["name"] for a in kept[-1]] == ["plain", "int4"] and kept[-1][1]["metrics"]["chain"]["seeds"] == [1]
    assert study.clock.now <= study.limit


def test_a_study_that_is_cut_keeps_the_tasks_of_its_last_arm(study, monkeypatch):
    """The second task of the second arm is cut off while it is measured."""
    kept, put = [], codec_quality.put

    def cut(llm, exam, plan, tokenizer):
        if llm.config.cache.kv_codec == "int4" and exam.spec.startswith("path"):
            raise KeyboardInterrupt
        return put(llm, exam, plan, tokenizer)

    monkeypatch.setattr(codec_quality, "put", cut)
    with pytest.raises(KeyboardInterrupt):
        codec_quality.answer(
            study, [Job(codec, 0, ("chain", "path"), (1,)) for codec in ("plain", "int4")], kept.append
        )
    assert [(a["name"], list(a["metrics"])) for a in kept[-1]] == [("plain", ["chain", "path"]), ("int4", ["chain"])]


def test_an_arm_that_lacks_a_task_is_measured_again(study, monkeypatch, tmp_path):
    """Control: an arm with all tasks is not, and one without time stays as it was."""
    file = tmp_path / "out.json"
    options = argparse.Namespace(output=file, commit=None, n=8, seeds=[1], tasks=["chain", "path"])

    def arms() -> dict[str, list[str]]:
        return {a["name"]: list(a["metrics"]) for a in json.loads(file.read_text())["arms"]}

    for limit, expected in ((3.5, ["chain"]), (0.5, ["chain"]), (4.5, ["chain", "path"]), (9.5, ["chain", "path"])):
        study.clock.now, study.limit, study.outcomes, study._seconds = 0.0, limit, {}, {}
        study.clock.asked.clear()
        study._figures, study._started = {}, 0.0
        paired_quality.measure(study, ["int4"], Report("case", options), {})
        assert arms()["int4"] == expected
    assert not study.clock.asked, "nothing is left to measure"


@pytest.mark.parametrize("device, pages", [("cuda", paired_quality.PAGES), ("cpu", None)])
@pytest.mark.parametrize("kind", [ssa_quality.Attentions, rounding_quality.Roundings])
def test_an_engine_beside_others_takes_a_part_of_the_gpu(kind, device, pages):
    """A share of what is free would take from the trainings that run at the same time."""
    made = kind(NANO, read_tokenizer(NANO), paired_quality.no_twin, device, 8, 1e9)
    assert made.config(Job("plain", 0, ("chain",), (1,))).cache.num_pages == pages


def test_twins_are_paired_to_the_model_itself(study):
    kept = []
    codec_quality.answer(
        study,
        [Job("plain", 0, ("chain",), (1,)), Job("int4", 8, ("chain",), (1,)), Job("int4", 0, ("chain",), (1,))],
        kept.append,
    )
    assert [a["config"] for a in kept[-1]] == [{}, {"outliers": 8}, {}]
    assert kept[-1][1]["metrics"]["chain"]["against_plain"]["only_first"] == 4


def test_what_matters_most_comes_first():
    todo = jobs(("chain", "needle"), (7, 8, 9), (8, 2))
    assert [j.codec for j in todo[:4]] == ["plain", "int4_bdr", "int4", "fp8"] and all(
        j.tasks == ("chain", "needle") for j in todo[:4]
    )
    assert [(j.codec, j.outliers) for j in todo[4:8]] == [("int4", 8), ("int4_bdr", 8), ("int4", 2), ("int4_bdr", 2)]
    orders = {j.codec for j in todo if j.codec.startswith("int4_bdr") and not j.outliers}
    assert len(orders) == 8, "four orders, keys alone and both"
    assert len(set(todo)) == len(todo) and {j.codec for j in jobs(("chain",), (7,), (), ["int4"])} == {"plain", "int4"}


def test_how_many_problems():
    assert len(task_specs("needle", 1000)) == 12 and set(task_specs("needle", 1000).values()) == {84}
    assert task_specs("story:form=prose,length=512", 1000) == {"story:form=prose,length=512": 48} and task_specs(
        "chain", 1000
    ) == {"chain": 1000}


def test_pooled_outcomes_hold_everything_once(study):
    parts = [
        codec_quality.put(
            SimpleNamespace(config=SimpleNamespace(cache=SimpleNamespace(kv_codec="int4"))), exam, plan, None
        )
        for seed in (1, 2)
        for plan, exam in study.exams("chain", seed)
    ]
    both = pooled(parts)
    assert (
        both.right.shape == (16, 1)
        and both.exam.problems == parts[0].exam.problems + parts[1].exam.problems
        and both.num_cut == 0
    )
    assert pooled(parts[:1]) is parts[0] and len(first(both, 3).exam.prompts) == 3 and first(both, 3).right.sum() == 0
    assert beginning(both.exam, 2).problems == both.exam.problems[:2]


def test_errors_of_cached_rows():
    found = row_errors(
        NANO, "cpu", [list(range(20, 60)), list(range(30, 50))], ["plain", "int8", "int4", "int4_bdr:order=16"]
    )
    assert found["plain"] == {"keys": 0.0, "values": 0.0}
    assert (
        0 < found["int8"]["keys"] < 1e-4 < found["int4"]["keys"] < 0.1
        and found["int4"]["values"] == found["int4_bdr:order=16"]["values"]
    )


def test_verdicts():
    def asked(codec, size, share, perplexity=3.0):
        return arm(
            codec, {"outliers": size} if size else {}, {"chain": {"exact": share}, "story": {"perplexity": perplexity}}
        )

    arms = [
        asked("plain", 0, 1.0),
        asked("int4_bdr", 0, 0.995, 3.06),
        asked("int4", 2, 0.9),
        asked("int4_bdr", 2, 1.0),
        asked("int4", 8, 0.5),
        asked("int4_bdr", 8, 0.96),
        asked("int4", 32, 0.0),
        asked("int4_bdr", 32, 0.1),
    ]
    arms += [
        arm(f"error of {name}", {}, {"relative_squared_error_keys": error})
        for name, error in (("nvfp4", 0.8), ("nvfp4:search=false", 1.0))
    ]
    ratios, targets = verdicts(arms)
    check(result("c", arms, ratios=ratios, targets=targets))
    assert {name: (t["ratio"], t["met"]) for name, t in targets.items()} == {
        "chain.exact int4_bdr/plain": (0.995, True),
        "story.perplexity int4_bdr/plain": (1.02, False),
        "chain.exact int4_bdr:outliers=8/plain": (0.96, False),
        "relative_squared_error_keys nvfp4/nvfp4:search=false": (0.8, True),
    }
    assert verdicts([asked("int4", 0, 1.0)]) == ({}, {})
