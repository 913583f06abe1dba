"""The recipes of nano and base at a tiny size: phases, own candidates, exact resume, curves, card and sampling."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir_lab import export, train
from kvasir_lab.evaluation import replies as lab_replies
from kvasir_lab.forms import FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.model import PLAIN, Compute, Model, Shape
from kvasir_lab.sample import complete, complete_all
from kvasir_lab.training import loop, own, state, trainer
from kvasir_lab.training.card import card
from kvasir_lab.training.data import Mixture, Rows
from kvasir_lab.training.recipe import BASE, NANO, RECIPES, Curves, Own, Phase
from kvasir_lab.training.report import curves
from kvasir_lab.training.workers import ahead, all_of

EASY = "chain:modulus=5,max_factor=2,min_steps=1,max_steps=1"
SHAPE = Shape(dim=16, layers=1, ffn=32, heads=2, kv_heads=1, head_dim=8, positions=4096)


def tiny(recipe, rows=2, **changes):
    """The recipe with a model, batches and counts that a CPU runs in seconds."""

    def small(parts):
        # Plain prose is left out, because tokenising takes seconds (test_train.py has it); needles are short.
        return tuple(
            Rows(
                rows if part.length == 1024 else 1,
                512,
                {
                    k.replace("min_length=512,length=4064", "length=400"): v
                    for k, v in part.mix.items()
                    if "prose,length" not in k
                },
            )
            for part in parts
        )

    phases = tuple(Phase(p.start, small(p.rows), p.own) for p in recipe.phases)
    return recipe.replace(
        name="tiny",
        shape=SHAPE,
        rows=small(recipe.rows),
        phases=phases,
        steps=30,
        minutes=None,
        pool=12,
        reply_tokens=6,
        validate=(Rows(1, 512, {EASY: 1.0}),),
        evaluate=((EASY, 3), ("judge_pair/chain", 2)),
        **changes,
    )


OWN = Own(((EASY, 1.0), ("countdown", 1.3)), problems=6, samples=4, reply_tokens=8)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("recipe, parameters", [(NANO, 2.46e6), (BASE, 16.1e6)], ids=["nano", "base"])
def test_the_recipes_keep_their_promises(recipe, parameters):
    assert Model(recipe.shape).num_parameters == pytest.approx(parameters, rel=0.01) and recipe.shape.positions == 4096
    mixed = {spec for rows in (recipe.rows, *(p.rows for p in recipe.phases)) for part in rows for spec in part.mix}
    names = {spec.split("/")[-1].split(":")[0] for spec in mixed if not spec.startswith("own/")}
    assert names == {
        "chain",
        "long_add",
        "reflect",
        "countdown",
        "path",
        "facts",
        "needle",
        "state",
        "template",
        "schema",
        "story",
        "chat",
        "tool",
    }
    assert {spec.split("/")[0] for spec in mixed if "/" in spec} == {
        "aggregate",
        "judge_one",
        "judge_pair",
        "self_evaluate",
        "refine",
        "own",
    }
    for spec in (
        mixed
        | {spec for spec, _ in recipe.evaluate}
        | set(recipe.curves.tasks)
        | {spec for spec, _ in recipe.own.tasks}
    ):
        if not spec.startswith("own/"):
            load_task(spec)
    prose = 0.0
    for (start, rows), end in zip(
        [(0, recipe.rows), *((p.start, p.rows) for p in recipe.phases)],
        [*(p.start for p in recipe.phases), 1.0],
        strict=True,
    ):
        prose += sum(
            part.count * part.length * share / sum(part.mix.values()) * (end - start) * recipe.steps
            for part in rows
            for spec, share in part.mix.items()
            if spec.startswith("story")
        )
    assert prose < 5.5 * 2.6e6  # passes over all prose


@pytest.mark.parametrize(
    "recipe, rows", [(NANO, 4), pytest.param(BASE, 5, marks=pytest.mark.slow)], ids=["nano", "base"]
)
def test_the_whole_recipe_runs_resumes_and_writes_its_card(recipe, rows, tmp_path, capsys, monkeypatch):
    small = tiny(recipe, rows, own=OWN, curves=Curves((EASY,), 4, samples=4, candidates=2))
    monkeypatch.setitem(RECIPES, "tiny", small)
    monkeypatch.setattr(loop, "LOOK", 5)
    folders = [tmp_path / "whole", tmp_path / "parts"]
    argv = ["--recipe", "tiny", "--device", "cpu", "--commit", "abc", "--out"]
    train.main([*argv, str(folders[0])])

    def interrupted(self, batches, step=trainer.Trainer.step):
        if self.done == 27:  # after the last sampling, between two saves
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", interrupted)
        train.main([*argv, str(folders[1]), "--save-every", "0.000001s"])
    assert state.load_state(folders[1], small)[0]["step"] == 25
    train.main([*argv, str(folders[1]), "--resume"])
    printed = capsys.readouterr().out
    assert printed.count("own replies: countdown") == 2 * sum(p.own for p in recipe.phases)
    a, b = (json.loads((f / "training.json").read_text()) for f in folders)
    timed = ("seconds",)
    assert [{k: v for k, v in row.items() if k not in timed} for row in a["history"]] == [
        {k: v for k, v in row.items() if k not in timed} for row in b["history"]
    ]
    assert (folders[0] / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()
    assert a["scores"] == b["scores"] and len(a["scores"]) == 2
    assert a["command"].endswith("--out whole") and str(tmp_path) not in (folders[0] / "README.md").read_text()
    assert sorted(f.name for f in folders[1].iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    text = (folders[1] / "README.md").read_text()
    assert all(
        part in text
        for part in (
            "own/aggregate",
            "from 6% of the run on",
            "pass@4",
            "majority@4",
            "judge_pair/chain",
            recipe.about[:40],
        )
    )


def test_a_lost_or_foreign_file_of_own_replies_is_refused(tokenizer, tmp_path):
    recipe = tiny(NANO, own=OWN).replace(
        rows=(Rows(1, 256, {EASY: 1.0}),),
        phases=(Phase(0.3, (Rows(1, 256, {EASY: 0.5, "own/aggregate": 0.5}),), True),),
    )
    t = trainer.Trainer(recipe, tokenizer, "cpu", workers=0)
    t.done = 20
    assert t.advance(tmp_path, print) and not t.advance(tmp_path, print) and t.phase == 1
    again = trainer.Trainer(recipe, tokenizer, "cpu", workers=0)
    again.restore(tmp_path)
    assert again.phase == 1 and np.array_equal(
        again.mixture.pools["own/aggregate"].ids, t.mixture.pools["own/aggregate"].ids
    )
    assert np.array_equal(again.mixture.batch(7, 1)[0].ids, t.mixture.batch(7, 1)[0].ids)
    made = state.load_own(tmp_path, 1)
    state.save_own(tmp_path, 2, made)
    with pytest.raises(ConfigError, match="of phase 2"):
        again.restore(tmp_path)
    (tmp_path / state.OWN_NAME).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="broken"):
        again.restore(tmp_path)
    (tmp_path / state.OWN_NAME).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        again.restore(tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"phases": (Phase(0.5, NANO.rows), Phase(0.2, NANO.rows))}, "one after another"),
        ({"phases": (Phase(1.0, NANO.rows),)}, "before 1"),
        ({"phases": (Phase(0.5, NANO.rows[:1]),)}, "same counts and lengths"),
        ({"own": None}, "own"),
        ({"shape": Shape(positions=1024)}, "exceed"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        NANO.replace(**change)


def test_the_fingerprint_is_of_the_training_and_not_of_the_measuring():
    assert NANO.replace(curves=Curves(), evaluate=(), about="x", minutes=1.0).fingerprint() == NANO.fingerprint()
    assert (
        len(
            {
                r.fingerprint()
                for r in (NANO, BASE, NANO.replace(seed=1), NANO.replace(own=OWN), NANO.replace(phases=NANO.phases[:1]))
            }
        )
        == 5
    )


# -------------------------------------------------------------------------------------------------------- own replies


def replies(task, rng, right, wrong):
    """Replies as a model would give them, made from the task's own solutions and slips."""
    drawn = task.drawn(rng, "train", 1)
    problem = task.as_problems(drawn, rng)[0]
    texts = [task.written(drawn, rng, np.array([i >= right]))[0] for i in range(right + wrong)]
    marks = tuple(task.check(problem, t) for t in texts)
    assert marks == (True,) * right + (False,) * wrong
    return lab_replies.Replies(problem, tuple(texts), marks, tuple(task.answer(t) for t in texts))


def test_cases_show_every_mix_and_learn_what_the_checker_says():
    rng, task = np.random.default_rng(0), load_task("chain")
    seen = set()
    for form in own.OWN_FORMS:
        formed = FormTask(form, task)
        for _ in range(60):
            for case in own.cases(rng, formed, replies(task, rng, 3, 3)):
                seen.add((form, case.difficulty))
                assert formed.check(case, case.solution)
                assert case.right == tuple(task.check(case.origin, c) for c in case.candidates)
    assert {n for form, n in seen if form == "aggregate"} == {0, 1, 2, 3}
    assert {n for form, n in seen if form == "judge_pair"} == {0, 1, 2} and {
        n for form, n in seen if form == "self_evaluate"
    } == {0, 1}


def test_choosing_keeps_the_count_of_right_ones_and_leaves_out_empty_replies():
    rng, task = np.random.default_rng(1), load_task("chain")
    group = replies(task, rng, 2, 3)
    for _ in range(20):
        chosen = lab_replies.choose(rng, group, 1, 3)
        assert sum(task.check(group.problem, t) for t in chosen) == 1 and len(set(chosen)) == 3
    assert lab_replies.choose(rng, group, 3, 3) is None and lab_replies.choose(rng, group, 0, 4) is None
    blank = lab_replies.Replies(group.problem, ("", " "), (False, False), (None, None))
    assert lab_replies.choose(rng, blank, 0, 1) is None


def test_curves_of_a_model_that_always_copies_candidate_one(tokenizer, monkeypatch):
    """A model that copies is right as often as the first candidate is."""
    from kvasir_lab.training import report

    rng, task = np.random.default_rng(2), load_task("chain")
    pool = [replies(task, rng, 4, 4) for _ in range(60)]
    monkeypatch.setattr(report, "sample_replies", lambda *a, **k: pool)

    def copy(model, tokenizer, prompts, max_new):
        return [
            m.group(1) if (m := re.search(r"Candidate 1:\n(.*?)\n\nCandidate 2:", p, re.S)) else "A: 9\nB: 2"
            for p in prompts
        ]

    monkeypatch.setattr(report, "complete_all", copy)
    rows = list(curves(None, tokenizer, NANO.replace(curves=Curves(("chain",), 60, samples=8, candidates=4))))
    samples, *rest = rows
    assert samples["pass@1"] == 0.5 and samples["pass@8"] == 1.0 and 0.5 <= samples["majority@8"] <= 1.0
    shares = [row["correct"] for row in rest if row["what"] == "aggregate"]
    assert (
        shares[0] == 0.0
        and shares[4] == 1.0
        and all(abs(s - n / 4) < 0.25 for n, s in enumerate(shares))
        and shares == sorted(shares)
    )
    mixed = next(row for row in rest if row["what"] == "judge_pair" and row["right candidates"] == "1 of 2")
    assert 0.25 < mixed["correct"] < 0.75 and all(row["alone"] == 0.5 for row in rest)
    record = {
        "scores": [],
        "curves": rows,
        "history": [],
        "parameters": 1,
        "tokens": 1,
        "train_seconds": 1,
        "own_seconds": 0,
        "total_seconds": 1,
        "steps": 1,
        "device": "x",
        "command": "c",
        "commit": "c",
        "versions": {},
        "date": "d",
    }
    text = card(NANO, record)
    assert "| 2 of 4 | 60 |" in text and "ended during the evaluation" in text


# ----------------------------------------------------------------------------------------------------------- sampling


def noisy(seed=0):
    model = Model(Shape(dim=32, layers=2, ffn=64, heads=4, kv_heads=2, head_dim=16, positions=256), seed)
    for p in model.parameters():
        p.data.mul_(4)
    return model.eval()


def test_rows_that_are_done_leave_the_batch_and_change_nothing():
    model = noisy()
    rng = np.random.default_rng(0)
    prompts = [[1, *rng.integers(40, 2000, n).tolist()] for n in rng.integers(1, 12, 16)]
    free = complete(model, prompts, 60, [])
    stops = sorted({row[5] for row in free[:10]})
    for prompt, row, got in zip(prompts, free, complete(model, prompts, 60, stops), strict=True):
        end = next((i for i, t in enumerate(row) if t in stops), len(row))
        assert got == row[:end], len(prompt)


def test_sampling_follows_the_model_and_its_seed():
    model = noisy(1)
    prompt = [1, 50, 60]
    with torch.no_grad():
        wanted = model(torch.tensor([prompt]))[0, -1].softmax(-1)
    draws = [
        complete(model, [prompt] * 2000, 1, [], temperature=1.0, generator=torch.Generator().manual_seed(s))
        for s in (0, 1, 0)
    ]
    assert draws[0] == draws[2] != draws[1]
    counts = np.bincount([row[0] for row in draws[0] + draws[1]], minlength=2048) / 4000
    # Total variation; another distribution is far above.
    assert np.abs(counts - wanted.numpy()).sum() / 2 < np.sqrt(2048 / 4000)
    top = int(wanted.argmax())
    assert abs(counts[top] - float(wanted[top])) < 4 * np.sqrt(float(wanted[top]) / 4000) + 1e-3


def test_all_prompts_get_a_reply_in_batches_that_fit(tokenizer, monkeypatch):
    from kvasir_lab import sample

    model = noisy(2)
    prompts = ["<bos>" + "wolf " * n for n in (3, 250, 1, 40, 2, 3)] + ["<bos>" + "wolf " * 300]
    together = complete_all(model, tokenizer, prompts, 8)
    monkeypatch.setitem(sample.POSITIONS, "cpu", 64)
    assert complete_all(model, tokenizer, prompts, 8) == together
    assert together[-1] is None and all(r is not None for r in together[:-1])  # the last prompt leaves no room


def test_rows_that_leave_a_batch_free_their_cache_layer_by_layer():
    """While rows leave, memory holds the old four layers and at most one copy."""
    from kvasir_lab import sample

    alive, most = 0, 0

    class Plane:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

        def __getitem__(self, index: torch.Tensor) -> Plane:
            return Plane()

    rows = object.__new__(sample._Rows)
    rows.padding = rows.last = torch.arange(3)
    rows.cache = [(Plane(), Plane()) for _ in range(4)]
    rows.keep(torch.tensor([0, 2]))
    assert alive == 8 and most <= 8 + 2 and rows.last.tolist() == [0, 2]


# ------------------------------------------------------------------------------------------------------------ workers


def test_workers_give_everything_in_order_and_pass_errors_on():
    assert (
        all_of(lambda n: n * n, list(range(23)), 3)
        == [n * n for n in range(23)]
        == all_of(lambda n: n * n, list(range(23)), 0)
    )
    assert all_of(lambda n: n, [], 2) == []

    def fail(n):
        if n == 4:
            raise ConfigError("number four")
        return n

    stream = ahead(fail, 0, 2)
    assert [next(stream) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="number four"):
        next(stream)


def test_a_worker_that_dies_is_noticed():
    import os

    stream = ahead(lambda n: os._exit(3) if n == 2 else n, 0, 2)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ConfigError, match="worker died"):
        next(stream)


def test_closing_the_stream_ends_its_processes():
    import multiprocessing

    others = set(multiprocessing.active_children())
    stream = ahead(lambda n: np.zeros(1 << 20), 0, 3)
    next(stream)
    assert len(set(multiprocessing.active_children()) - others) >= 3
    stream.close()
    assert not set(multiprocessing.active_children()) - others


def test_a_form_without_documents_gives_its_share_to_the_others(tokenizer):
    mixture = Mixture((Rows(2, 128, {EASY: 0.5, "own/refine": 0.5}),), tokenizer, 0)
    assert mixture.batch(0)[0].num_tokens > 0


def test_a_fused_kernel_that_fails_is_replaced_aloud(tokenizer, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel\nfor this device")

    said = []
    recipe = tiny(NANO, own=OWN).replace(rows=(Rows(1, 256, {EASY: 1.0}),), phases=())
    t, plain = (trainer.Trainer(recipe, tokenizer, "cpu", workers=0) for _ in range(2))
    t.compute = Compute(layer=broken, fused=True)
    monkeypatch.setattr(trainer, "compiled", lambda fused: PLAIN)
    batch = t.mixture.batch(0)
    assert torch.equal(t.first_step(batch, said.append), plain.step(batch)) and "no kernel" in said[0] and t.done == 1
    t.compute = Compute(layer=broken)
    with pytest.raises(RuntimeError):
        t.first_step(batch, said.append)


def test_a_serving_copy_keeps_its_angles_exact():
    model = noisy()
    lower = model.to(torch.bfloat16)
    assert lower.rope(200)[0].dtype == torch.float32 and torch.equal(lower.rope(200)[0], noisy().rope(200)[0])


def test_the_command_passes_its_options_on(monkeypatch):
    from typer.testing import CliRunner

    from kvasir_lab.commands.lab import lab

    seen = []
    monkeypatch.setattr(train, "main", lambda argv: seen.append(train.arguments(argv)))
    result = CliRunner().invoke(
        lab.app, ["train", "nano", "--stop-after", "8m", "--resume", "--device", "cpu", "--workers", "0"]
    )
    assert (
        result.exit_code == 0
        and seen[0].recipe == "nano"
        and seen[0].stop_after == 480
        and seen[0].resume
        and str(seen[0].out) == "lab-nano"
    )
    monkeypatch.undo()
    result = CliRunner().invoke(lab.app, ["train", "nanno"])
    assert isinstance(result.exception, ConfigError) and "nano" in str(result.exception)


def test_a_large_model_is_written_in_shards_that_transformers_reads(tokenizer, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    model = noisy(3)
    (tmp_path / "model.safetensors").write_bytes(b"an older export")
    monkeypatch.setattr(export, "SHARD", 100_000)
    export.export(model, tokenizer, tmp_path)
    shards = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    for a, b in zip(model.parameters(), export.load(tmp_path).parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16).float(), b)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(hf.model.norm.weight, export.load(tmp_path).model.norm.weight)
    (tmp_path / shards[0]).unlink()
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        export.load(tmp_path)


def test_the_shards_of_base_stay_small():
    assert 2 * Model(BASE.shape).model.embed_tokens.weight.numel() < export.SHARD < 15e6


# ------------------------------------------------------------------------------------- continuing a finished model


def test_a_finished_model_goes_on_with_the_last_phase(tokenizer, tmp_path, monkeypatch, capsys):
    small = tiny(NANO, own=OWN, curves=Curves()).replace(
        rows=(Rows(1, 256, {EASY: 1.0}),),
        phases=(Phase(0.5, (Rows(1, 256, {EASY: 0.5, "own/judge_pair": 0.5}),), True),),
    )
    monkeypatch.setitem(RECIPES, "tiny", small)
    monkeypatch.setattr(loop, "LOOK", 5)
    argv = ["--recipe", "tiny", "--device", "cpu", "--commit", "abc", "--out"]
    train.main([*argv, str(tmp_path / "first")])
    first = export.load(tmp_path / "first")
    capsys.readouterr()
    onwards = [*argv, str(tmp_path / "second"), "--continue-from", str(tmp_path / "first"), "--steps", "20"]
    train.main([*onwards, "--stop-after", "0.000001s"])
    stopped = state.load_state(tmp_path / "second", small.continued().replace(steps=20))
    assert stopped[0]["phase"] == 1 and stopped[0]["step"] == 5 and "own replies" in capsys.readouterr().out
    moved = max(float((stopped[1][f"model.{name}"] - p).abs().max()) for name, p in first.state_dict().items())
    assert 0 < moved < 0.05, "it goes on from the finished weights, not from new ones"
    with pytest.raises(ConfigError, match="other settings"):  # the state of a continued run does not fit a whole run
        train.main([*argv, str(tmp_path / "second"), "--resume"])
    train.main([*onwards, "--resume"])
    record = json.loads((tmp_path / "second" / "training.json").read_text())
    assert record["steps"] == 20 and record["before"]["steps"] == 30
    assert "continued a finished model" in (tmp_path / "second" / "README.md").read_text()
    other = small.replace(shape=Shape(dim=16, layers=2, ffn=32, heads=2, kv_heads=1, head_dim=8, positions=4096))
    monkeypatch.setitem(RECIPES, "tiny", other)
    with pytest.raises(ConfigError, match="another shape"):
        train.main([*argv, str(tmp_path / "third"), "--continue-from", str(tmp_path / "first")])
    with pytest.raises(ConfigError, match="no later phase"):
        RECIPES["nano"].replace(phases=()).continued()


def test_another_models_mistakes_are_learnt_from(tokenizer, monkeypatch):
    task = load_task("chain")
    monkeypatch.setattr(lab_replies, "complete_all", lambda model, tokenizer, prompts, *a, **k: [model] * len(prompts))
    kept = []
    monkeypatch.setattr(own, "all_of", lambda make, chunks, workers: kept.extend(chunks) or [])
    plan = Own((("chain", 1.3),), problems=3, samples=8)
    right = task.problems("train", 1000, 3)[0].solution
    assert own.own_documents(right, tokenizer, plan, 1, 0, lambda text: None, others=["nonsense"]) == {}
    pool = [given for _, chunk in kept for _, given in chunk]
    assert [r.texts for r in pool] == [(right,) * 8 + ("nonsense",) * 2] * 3 and pool[0].right == (True,) * 8 + (
        False,
    ) * 2


def test_own_pairs_to_judge_are_mostly_mixed_and_checked():
    rng, task = np.random.default_rng(0), load_task("countdown")
    pairs = [
        case for _ in range(100) for case in own.cases(rng, FormTask("judge_pair", task), replies(task, rng, 3, 3))
    ]
    mixed = sum(case.difficulty == 1 for case in pairs)
    assert 0.55 < mixed / len(pairs) < 0.8
    assert all("good" in case.solution or "bad" in case.solution for case in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_writes_what_a_plain_one_writes():
    """Sampling replays a CUDA graph, whose greedy tokens must be those of the CPU.

    Rows leave the batch on the way.
    """
    model = noisy()
    rng = np.random.default_rng(0)
    prompts = [[1, *rng.integers(40, 2000, n).tolist()] for n in rng.integers(1, 12, 16)]
    free = complete(model, prompts, 60, [])
    stops = sorted({row[5] for row in free[:10]})
    wanted = complete(model, prompts, 60, stops)
    from kvasir_lab import sample

    on_device = noisy().to("cuda")
    rows = sample._Rows(on_device, prompts, 8, lambda logits: logits.argmax(-1))
    with torch.inference_mode():
        rows.step()
    assert rows.graph is not None, "no graph was captured"
    assert complete(on_device, prompts, 60, stops) == wanted
