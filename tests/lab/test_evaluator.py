"""The evaluator against plain torch and by hand: answers and losses of the engine, paired figures, and refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from kvasir import LLM
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir_lab import export
from kvasir_lab.evaluation import command as command
from kvasir_lab.evaluation import statistics as stats
from kvasir_lab.evaluation.evaluate import evaluate
from kvasir_lab.evaluation.evaluator import (
    Answers,
    Exam,
    Losses,
    Plan,
    noise_seed,
    prepare,
    read_tokenizer,
    repetition,
    run,
    run_own,
)
from kvasir_lab.evaluation.scores import compare, figures, pass_values, pool_sizes
from kvasir_lab.lookup import load_task
from kvasir_lab.task import Problem

EASY = "chain:min_steps=4,max_steps=5"
HARD = "chain:modulus=499,max_factor=30,min_steps=1,max_steps=3"  # nano gets some wrong
ENGINE = dict(model="nano", device="cpu", cpu_cache_bytes=1 << 25)
CONFIG = EngineConfig.of(**ENGINE)


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(checkpoint.resolve("nano"))


@pytest.fixture(scope="module")
def llm():
    with LLM(**ENGINE) as engine:
        yield engine


def answered(llm, tokenizer, *tasks, **options):
    plan = Plan(tasks, **options)
    return [run(llm, exam, plan, tokenizer) for exam in prepare(plan, tokenizer)]


# ------------------------------------------------------------------------------------------------ against plain torch


def test_exact_match_is_that_of_plain_torch(llm, tokenizer):
    model = export.load(checkpoint.resolve("nano"))
    for outcome in answered(llm, tokenizer, EASY, HARD, count=8, seed=3):
        wanted = evaluate(model, tokenizer, outcome.exam.spec, 8, seed=3, max_new=outcome.exam.limit)
        found = figures(outcome)
        assert (
            found["right"] == wanted.right
            and found["exact"] == wanted.share
            and tuple(found["interval"]) == wanted.interval
        )
        assert found["problems"] == 8 and found["samples"] == 1 and found["cut_replies"] == 0
        assert found["output_tokens"] == outcome.tokens.sum() > 8 * 10 and found["prompt_tokens"] > 8 * 10
        assert sum(group["problems"] for group in found["by_difficulty"].values()) == 8


@torch.inference_mode()
def test_losses_are_those_of_plain_torch(llm, tokenizer):
    model = export.load(checkpoint.resolve("nano"))
    for outcome in answered(llm, tokenizer, "story", "story:form=prose,length=96", count=6, seed=3):
        nats, tokens, text = 0.0, 0, b""
        for ids, trained in zip(outcome.exam.prompts, outcome.exam.trained):
            logprobs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
            counted = [i for i in range(len(ids)) if trained[i]]
            nats -= sum(logprobs[i - 1, ids[i]].item() for i in counted)
            tokens += len(counted)
            text += tokenizer.decode([ids[i] for i in counted], skip_special_tokens=True).encode()
        found = figures(outcome)
        assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
        assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-4)
        assert found["interval"][0] < found["bits_per_byte"] < found["interval"][1]
        assert (found["documents"], found["scored_tokens"], found["scored_bytes"]) == (6, tokens, len(text))


def test_a_known_source_is_reported_beside_the_model(llm, tokenizer):
    (outcome,) = answered(llm, tokenizer, "template", count=4)
    task = outcome.exam.task
    for ids, trained, bits in zip(outcome.exam.prompts, outcome.exam.trained, outcome.known_bits):
        text = tokenizer.decode([t for t, counted in zip(ids, trained) if counted], skip_special_tokens=True)
        assert bits == pytest.approx(sum(task.surprisal(s) for s in text.split("\n"))) and bits > 10
    found = figures(outcome)
    assert 0 < found["source_bits_per_byte"] < found["bits_per_byte"]


def test_a_prompt_form_is_told_apart_by_right_candidates(llm, tokenizer):
    (outcome,) = answered(llm, tokenizer, EASY, count=16, form="aggregate", max_tokens=8)
    assert outcome.exam.spec == f"aggregate/{EASY}"
    found = figures(outcome)
    wanted = {str(sum(p.right)) for p in outcome.exam.problems}
    assert set(found["by_difficulty"]) == wanted and len(wanted) > 2


def test_the_prefix_cache_changes_no_loss(llm, tokenizer):
    plan = Plan(("story:form=prose,length=96",), count=4)
    (exam,) = prepare(plan, tokenizer)
    first, second = (run(llm, exam, plan, tokenizer) for _ in range(2))
    assert np.allclose(first.nats, second.nats, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ samples


def test_a_pool_of_samples(llm, tokenizer):
    (outcome,) = answered(llm, tokenizer, HARD, count=12, seed=5, samples=6, temperature=1.0)
    assert outcome.right.shape == outcome.tokens.shape == (12, 6) and [len(v) for v in outcome.votes] == [6] * 12
    assert 0 < outcome.right.mean() < 1, "the case must separate right from wrong"
    found = figures(outcome)
    assert list(found["pass"]) == list(found["majority"]) == ["1", "2", "4", "6"]
    assert found["pass"]["1"]["share"] == pytest.approx(found["exact"]) == pytest.approx(found["right"] / 72)
    assert found["pass"]["6"]["share"] == pytest.approx(np.mean(outcome.right.any(1)))
    shares = [p["share"] for p in found["pass"].values()]
    assert shares == sorted(shares)
    # A vote is the reply's own answer, and equal answers are equally right.
    for problem, votes, right in zip(outcome.exam.problems, outcome.votes, outcome.right):
        assert all((vote == problem.answer) >= bool(mark) for vote, mark in zip(votes, right))
    again = answered(llm, tokenizer, HARD, count=12, seed=5, samples=6, temperature=1.0)[0]
    assert np.array_equal(again.right, outcome.right) and again.votes == outcome.votes


def test_pool_sizes_and_seeds():
    assert pool_sizes(1) == [1] and pool_sizes(16) == [1, 2, 4, 8, 16] and pool_sizes(6) == [1, 2, 4, 6]
    seeds = {noise_seed(s, t, i) for s in (0, 1) for t in ("chain", "path") for i in range(50)}
    assert len(seeds) == 200 and all(0 <= s < 1 << 63 for s in seeds)


# ----------------------------------------------------------------------------------------------------- own candidates


def test_forms_on_candidates_of_the_models_own(llm, tokenizer):
    plan = Plan((HARD,), count=16, seed=5, samples=8, temperature=1.0, own=True, form="aggregate,judge_pair,refine")
    (exam,) = prepare(plan, tokenizer)
    solved, *forms = run_own(llm, exam, plan, tokenizer)
    again, *_ = answered(llm, tokenizer, HARD, count=16, seed=5, samples=8, temperature=1.0)
    assert np.array_equal(solved.right, again.right), "the pool is that of a plain run"
    assert [o.exam.spec for o in forms] == [f"{form}/{HARD}" for form in plan.forms]
    written = {text for texts in solved.texts for text in texts}
    for outcome, count in zip(forms, (4, 2, 1)):
        assert outcome.right.shape == (len(outcome.alone), 1) and {
            len(p.candidates) for p in outcome.exam.problems
        } == {count}
        seen = set()
        for problem, alone in zip(outcome.exam.problems, outcome.alone):
            assert set(problem.candidates) <= written and problem.difficulty == sum(problem.right)
            row = next(i for i, p in enumerate(exam.problems) if p is problem.origin)
            assert alone == solved.right[row].mean() and set(problem.candidates) <= set(solved.texts[row])
            seen.add(problem.difficulty)
        assert len(seen) > 1, "the case must hold more than one mix"
        found = figures(outcome)["by_difficulty"]
        assert set(found) == {str(n) for n in seen} and all(0 <= group["alone"] <= 1 for group in found.values())
    assert "alone" not in figures(solved)["by_difficulty"]["2"]


def test_own_candidates_that_cannot_be(llm):
    for options in (dict(form="solve"), dict(form="aggregate", samples=2), dict(form="aggregate,solve")):
        with pytest.raises(ConfigError, match="own candidates need"):
            Plan((HARD,), own=True, **{"samples": 8, **options})
    with pytest.raises(ConfigError, match="no prompt form named 'agregate'"):
        Plan((HARD,), own=True, samples=8, form="agregate")
    with pytest.raises(ConfigError, match="cannot be combined"):
        command.run(
            CONFIG,
            Plan((HARD,), own=True, samples=8, form="aggregate"),
            against="--dtype bfloat16",
            output=None,
            plot=None,
        )


def test_rechecks_are_counted(llm, tokenizer):
    (outcome,) = answered(llm, tokenizer, "reflect:min_steps=4,max_steps=4", count=4, max_tokens=4)
    assert figures(outcome)["tally"].keys() == {"slips", "right steps", "useful", "needless"}
    text = "1+2=5\n\nWait, 1+2=3\n\n3*2=6\n\nWait, 3*2=6\n\nAnswer: 6"
    problem = outcome.exam.problems[0]
    assert outcome.exam.task.tally(problem, text) == {"slips": 1, "right steps": 1, "useful": 1, "needless": 1}
    task = load_task("schema")
    problem = next(p for p in task.problems("test", 0, 50) if not p.answer.endswith("#types"))
    other = problem.solution.replace(":", " :")
    values = json.dumps({k: type(v)() for k, v in json.loads(problem.solution).items()})
    assert [task.tally(problem, text)["valid"] for text in (problem.solution, other, values, "{}", "no")] == [
        1,
        1,
        1,
        0,
        0,
    ]
    assert task.check(problem, other) and not task.check(problem, values)
    assert "tally" not in figures(answered(llm, tokenizer, EASY, count=2, max_tokens=4)[0])


# ---------------------------------------------------------------------------------------------------- figures by hand


def outcome_of(right, votes=None, tokens=10):
    right = np.array(right, dtype=bool)
    problems = [Problem((), "", "", difficulty=i % 2) for i in range(len(right))]
    exam = Exam("made", load_task("chain"), problems, [[1, 2]] * len(right))
    return Answers(exam, right, np.full(right.shape, tokens), votes or [["1"] * right.shape[1]] * len(right), 0, 1.0)


def test_figures_by_hand():
    found = figures(outcome_of([[1], [1], [0], [1]]))
    assert found["exact"] == 0.75 and tuple(found["interval"]) == stats.wilson(3, 4)
    assert found["by_difficulty"] == {
        "0": {"problems": 2, "exact": 0.5, "interval": list(stats.wilson(1, 2))},
        "1": {"problems": 2, "exact": 1.0, "interval": list(stats.wilson(2, 2))},
    }
    assert "pass" not in found
    pool = outcome_of([[1, 0], [0, 0]], votes=[["5", "6"], [None, None]])
    assert figures(pool)["pass"]["2"]["share"] == 0.5 and figures(pool)["majority"]["2"]["share"] == 0.25
    assert pass_values(pool, 1).tolist() == [0.5, 0.0]
    silent = outcome_of([[1, 0], [0, 0]], votes=[[None, None]] * 2)
    assert "majority" not in figures(silent), "a task without votes has no majority"


def test_equal_values_are_not_taken_for_certainty():
    found = figures(outcome_of([[1, 1]] * 10))
    assert found["interval"] == list(stats.wilson(10, 10)) == found["pass"]["2"]["interval"]
    same = compare(outcome_of([[1]] * 10), outcome_of([[1]] * 10))
    assert same["difference"] == 0 and same["interval"][0] == -same["interval"][1] == -stats.wilson(0, 10)[1]
    assert same["problems_needed"] is None and same["mcnemar_p"] == 1.0


def test_comparison_by_hand():
    first = outcome_of([[1]] * 70 + [[0]] * 30)
    second = outcome_of([[0]] * 5 + [[1]] * 80 + [[0]] * 15, tokens=12)
    found = compare(first, second)
    assert (found["only_first"], found["only_second"]) == (5, 15) and found["difference"] == pytest.approx(0.10)
    assert found["mcnemar_p"] == stats.mcnemar(5, 15) == pytest.approx(0.0414, abs=1e-4)
    assert found["problems_needed"] == 155 and found["extra_tokens_per_reply"] == 2.0
    low, high = found["interval"]
    half = 1.96 * math.sqrt((0.20 - 0.01) / 100)
    assert (low, high) == pytest.approx((0.10 - half, 0.10 + half), abs=0.015)
    back = compare(second, first)
    assert back["difference"] == -found["difference"] and back["mcnemar_p"] == found["mcnemar_p"]
    assert "mcnemar_p" not in compare(outcome_of([[1, 0]] * 3), outcome_of([[1, 1]] * 3))


def test_comparison_of_losses_by_hand():
    def losses(nats, known=None):
        return Losses(
            Exam("made", load_task("story"), [], []), np.array(nats), np.array([10, 20]), np.array([30, 50]), 1.0, known
        )

    assert figures(losses([8.0, 16.0], np.array([4.0, 12.0])))["source_bits_per_byte"] == 0.2

    found = compare(losses([8.0, 16.0]), losses([9.0, 17.0]))
    assert found["difference"] == pytest.approx(2 / math.log(2) / 80) and found["unit"] == "bits per byte"
    assert found["interval"][0] > 0 and found["documents_needed"] >= 1


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_table_json_and_plot(tmp_path, capsys):
    plan = Plan((HARD, "story:form=prose,length=64"), count=4, samples=2, temperature=1.0)
    command.run(
        CONFIG, plan, against="--max-num-seqs 4 --dtype bfloat16", output=tmp_path / "r.json", plot=tmp_path / "r.png"
    )
    text = capsys.readouterr().out
    for words in (
        "exact %",
        "pass@k",
        "bits a byte",
        "source",
        "B - A",
        "A: nano",
        "B: --max-num-seqs 4 --dtype bfloat16",
    ):
        assert words in text, words
    outcome = json.loads((tmp_path / "r.json").read_text())
    fields = "case machine commit date versions command hardware arms ratios limits"
    assert set(outcome) == set(fields.split())
    first, second, difference = outcome["arms"]
    assert (first["name"], difference["name"]) == ("nano", "difference")
    assert second["config"]["dtype"] == "bfloat16" and first["config"]["plan"] == second["config"]["plan"]
    assert set(first["metrics"]) == set(difference["metrics"]) == set(plan.specs)
    exact = [a["metrics"][HARD]["exact"] for a in (first, second)]
    assert difference["metrics"][HARD]["difference"] == pytest.approx(exact[1] - exact[0])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_from_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from kvasir.cli.main import app

    switches = [
        "--device",
        "cpu",
        "--cpu-cache-bytes",
        str(1 << 25),
        "--against",
        "--max-num-seqs 1 --no-enable-prefix-caching",
    ]
    done = CliRunner().invoke(
        app, ["eval", "nano", "--tasks", f"{EASY},{HARD}", "-n", "3", "--json", str(tmp_path / "r.json"), *switches]
    )
    assert done.exit_code == 0, done.output
    outcome = json.loads((tmp_path / "r.json").read_text())
    assert set(outcome["arms"][0]["metrics"]) == {EASY, HARD} and outcome["arms"][0]["name"] == "nano"
    assert {d["difference"] for d in outcome["arms"][-1]["metrics"].values()} == {0.0}, (
        "neither switch may change a greedy answer"
    )
    assert outcome["arms"][0]["config"]["plan"]["seed"] == 7


def test_what_is_through_is_kept_when_somebody_has_seen_enough(tmp_path, capsys, monkeypatch):
    from kvasir_lab.evaluation import evaluator

    answered, most = [], 1

    def put(llm, exam, *args, **kwargs):
        if len(answered) == most:
            raise KeyboardInterrupt
        answered.append(exam.spec)
        return run(llm, exam, *args, **kwargs)

    monkeypatch.setattr(evaluator, "run", put)
    plan = Plan((EASY, HARD), count=2)
    with pytest.raises(KeyboardInterrupt):
        command.run(CONFIG, plan, against=None, output=tmp_path / "r.json", plot=None)
    (only,) = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert answered == list(only["metrics"]) == [EASY] and EASY in capsys.readouterr().out
    answered, most = [], 3
    with pytest.raises(KeyboardInterrupt):
        command.run(CONFIG, plan, against="--max-num-seqs 4", output=tmp_path / "r.json", plot=tmp_path / "r.png")
    (only,) = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert list(only["metrics"]) == [EASY, HARD], "half a second configuration is compared with nothing"
    assert HARD in capsys.readouterr().out and (tmp_path / "r.png").exists()


def test_the_plot_says_what_it_needs(monkeypatch, tmp_path):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib.*pip install"):
        command.run(CONFIG, Plan((EASY,), count=1), against=None, output=None, plot=tmp_path / "r.png")


def test_tasks_are_split_where_a_name_begins():
    assert command.split_tasks("chain,needle") == ("chain", "needle")
    assert command.split_tasks("chain:modulus=11,max_steps=4, needle ,story:form=prose,length=9") == (
        "chain:modulus=11,max_steps=4",
        "needle",
        "story:form=prose,length=9",
    )
    assert command.split_tasks("a,b=1") == ("a", "b=1")  # the task's own error names the dial
    assert command.split_tasks(" , ") == ()


def test_the_second_configuration():
    second = command.second_config(
        CONFIG, "--max-num-seqs 8 --no-enable-prefix-caching --model 'some folder' --block-size=32"
    )
    assert second == CONFIG.replace(max_num_seqs=8, enable_prefix_caching=False, model="some folder", page_slots=32)
    for switches, words in (
        ("", "changes nothing"),
        ("--device cpu", "changes nothing"),
        ("--max-num-sequences 8", "Did you mean '--max-num-seqs'"),
        ("--dtype int8", "int8"),
        ("--max-num-seqs", "requires an argument"),
        ("'--open", "No closing quotation"),
        ("stray", "unexpected extra argument"),
        ("--help", "holds no configuration"),
    ):
        with pytest.raises(ConfigError) as e:
            command.second_config(CONFIG, switches)
        assert words.lower() in str(e.value).lower(), (switches, str(e.value))


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(tasks=()), "at least one task"),
        (dict(tasks=("chain", "chain")), "each once"),
        (dict(count=0), "n=0"),
        (dict(samples=0), "samples=0"),
        (dict(max_tokens=0), "max_tokens=0"),
        (dict(seed=-1), "seed=-1"),
        (dict(split="tset"), "no split named 'tset'"),
        (dict(samples=4, temperature=0.0), "greedy replies are all the same"),
        (dict(temperature=-1.0), "temperature=-1"),
    ],
)
def test_bad_plans(options, words):
    with pytest.raises(ConfigError, match=words):
        Plan(**{"tasks": ("chain",), **options})


@pytest.mark.parametrize(
    "plan,words",
    [
        (Plan(("chian",)), ["no tasks named 'chian'", "Did you mean 'chain'"]),
        (Plan(("chain:steps=3",)), ["no option 'steps'"]),
        (
            Plan(("chain:modulus=5,max_factor=2,min_steps=1,max_steps=1",), count=200),
            ["different problems, too few for n=200"],
        ),
        (Plan(("story",), count=800), ["split 'test' of 'story' is small", "times; take n="]),
        (Plan(("story:form=prose,length=512",), count=400), ["is small"]),
        (Plan(("chain",), form="aggregat"), ["no prompt form named 'aggregat'", "Did you mean 'aggregate'"]),
        (Plan(("story",), form="aggregate"), ["'story' has no prompt forms"]),
    ],
)
def test_what_cannot_be_prepared(plan, words, tokenizer):
    with pytest.raises(ConfigError) as e:
        prepare(plan, tokenizer)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_a_context_too_short(tokenizer):
    plan = Plan(("story:form=prose,length=96", "chain:min_steps=12"), count=2)
    with LLM(**ENGINE, max_model_len=64) as engine:
        for exam in prepare(plan, tokenizer):
            with pytest.raises(ConfigError, match="tokens of context.*serves 64"):
                run(engine, exam, plan, tokenizer)


def test_a_reply_that_is_cut_is_counted(llm, tokenizer):
    (outcome,) = answered(llm, tokenizer, EASY, count=3, max_tokens=5)
    assert outcome.num_cut == 3 and not outcome.right.any() and (outcome.tokens == 5).all()


@pytest.mark.parametrize("where", ["model", "against"])
def test_a_model_with_another_vocabulary(where, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    config = CONFIG.replace(model=str(tmp_path)) if where == "model" else CONFIG
    with pytest.raises(
        ConfigError,
        match=f"lab's vocabulary, which {tmp_path.name} does not have: the tokenizer has 2 entries, the lab's has 2048",
    ):
        command.run(
            config,
            Plan((EASY,), count=1),
            against=f"--model {tmp_path}" if where == "against" else None,
            output=None,
            plot=None,
        )


def test_repetition():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 2048, 3200, dtype=np.int32)
    halves = [text[:1600], text[1600:]]
    assert repetition(halves) == 1.0
    assert repetition(halves * 3) == 3.0
    assert repetition([text[i : i + 320] for i in range(0, 2880, 80)]) == pytest.approx(3.3, abs=0.4)
    assert repetition([text[:5], text[:5], text[:6], text[9:12]]) == pytest.approx(4 / 3)  # shorter than a stretch


# ---------------------------------------------------------------------------------------------------- names of models


def test_names_of_shipped_models(tmp_path, monkeypatch):
    assert checkpoint.shipped() == ["base", "nano"]
    for name in checkpoint.shipped():
        assert (checkpoint.resolve(name) / "config.json").is_file()
    monkeypatch.setattr(checkpoint, "_assets", lambda: tmp_path)
    for name in ("nano", "base", "unfinished"):
        (tmp_path / name).mkdir()
        if name != "unfinished":
            (tmp_path / name / "config.json").write_text("{}")
    assert checkpoint.shipped() == ["base", "nano"]
    assert checkpoint.resolve("nano") == tmp_path / "nano"
    here = tmp_path / "here"
    (here / "nano").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert checkpoint.resolve("nano") == tmp_path / "nano", "a folder that is no model does not stand before it"
    (here / "nano" / "config.json").write_text("{}")
    assert checkpoint.resolve("nano") != tmp_path / "nano", "a model here goes first"
