"""Reward models: places and labels of a model's own replies, the loss, and scores of the engine and the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.primitives import Context, Run, opened
from kvasir.scaling.problem import Problem, Prompts
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab import export
from kvasir_lab.chat import prompt
from kvasir_lab.drafters.data import Batch, Texts
from kvasir_lab.rewards import self_evaluation
from kvasir_lab.rewards.beginnings import Beginnings, Replies, label, newlines, sample_replies
from kvasir_lab.rewards.score import Plan, RewardNet, fit, load, loss_of, measure, scores, train
from kvasir_lab.solving.job import Job, build_endpoints, missing_rewards
from tests.scaling.test_engine_endpoint import engine

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = "chain:min_steps=1,max_steps=3"


@pytest.fixture(scope="module")
def nano():
    return export.load(checkpoint.resolve("nano"))


@pytest.fixture(scope="module")
def replies(nano, tokenizer) -> Replies:
    return sample_replies(nano, tokenizer, TASK, 32, 4, "train", 1, say=lambda text: None)


# -------------------------------------------------------------------------------------------------- places and labels


def test_places_are_the_ends_of_lines_and_of_replies(replies, tokenizer):
    ends = newlines(tokenizer)
    for i in range(len(replies)):
        ids, first = replies.texts.text(i), replies.texts.begins[i]
        assert replies.lines[i][-1] == len(ids) - 1
        for place in replies.lines[i][:-1]:
            assert ends[ids[place]] and replies.written(tokenizer, i, int(place)).endswith("\n")
        assert len(replies.lines[i]) - 1 == replies.written(tokenizer, i, len(ids) - 1).count("\n")
        assert all(first <= place < len(ids) and place not in replies.lines[i] for place in replies.between[i])
    assert set(np.diff(np.unique(replies.problem_of))) == {1}


def test_labels_by_outcome_and_by_a_fresh_start(replies, nano, tokenizer):
    by_outcome, restart = (label(replies, kind, nano, tokenizer).label for kind in ("outcome", "restart"))
    for i, begin in enumerate(replies.texts.bounds[:-1]):
        places = begin + np.concatenate([replies.lines[i], replies.between[i]])
        others = [r for j, r in enumerate(replies.right) if replies.problem_of[j] == replies.problem_of[i] and j != i]
        assert set(by_outcome[places]) == {float(replies.right[i])}
        fresh = 1.0 if replies.right[i] else 1 - np.mean(others)
        assert np.allclose(restart[places], fresh)
    labelled = np.count_nonzero(~np.isnan(by_outcome))
    assert labelled == sum(map(len, replies.lines)) + sum(map(len, replies.between)) + len(replies)
    with pytest.raises(ConfigError, match="labels=best"):
        label(replies, "best", nano, tokenizer)


def test_labels_by_rollouts_and_by_the_task_look_at_the_lines(replies, nano, tokenizer):
    """A whole reply keeps its outcome, and equal beginnings have equal labels."""
    for kind in ("rollouts", "task"):
        found = label(replies, kind, nano, tokenizer, k=2).label
        told: dict[tuple[int, ...], float] = {}
        for i, begin in enumerate(replies.texts.bounds[:-1]):
            assert found[begin + replies.lines[i][-1]] == replies.right[i]
            for place in replies.lines[i][:-1].tolist():
                value = found[begin + place]
                assert value in ((0, 0.5, 1) if kind == "rollouts" else (0, 1))
                assert told.setdefault(tuple(replies.texts.text(i)[: place + 1].tolist()), value) == value
                if kind == "task":
                    solution = replies.problems[replies.problem_of[i]].solution
                    assert value == solution.startswith(replies.written(tokenizer, i, place))


# -------------------------------------------------------------------------------------------------------- training


def toy(count: int = 24) -> Beginnings:
    """Replies whose third token decides: after 11 they are right, after 12 they are wrong."""
    rng = np.random.default_rng(0)
    right = rng.random(count) < 0.5
    parts = [np.array([5, 6, 11 if r else 12, 7, 8], np.int32) for r in right]
    texts = Texts(
        np.concatenate(parts), np.arange(0, 5 * count + 1, 5), np.full(count, 2), np.zeros(count, int), ("t",)
    )
    told = np.full(5 * count, np.nan, np.float32)
    for i, r in enumerate(right):
        told[[5 * i + 2, 5 * i + 4]] = float(r)
    return Beginnings(
        Replies(texts, right, np.arange(count), [np.array([2, 4])] * count, [np.array([], int)] * count), told
    )


@pytest.mark.parametrize("tune", [pytest.param("all", marks=pytest.mark.slow), "head"])
def test_it_learns_what_decides_and_the_head_alone_leaves_the_model(nano, tune):
    beginnings = toy()
    net = RewardNet(export.load(checkpoint.resolve("nano")))
    history = fit(net, beginnings, Plan(tune=tune, epochs=4, each=1, replies=24), say=lambda text: None)
    found = measure(scores(net, beginnings.replies), beginnings.replies)
    assert history[-1]["loss"] < history[0]["loss"] and found["auc"] == 1.0 and found["auc_prompt"] == 0.5
    same = all(torch.equal(a, b) for a, b in zip(net.trunk.parameters(), nano.parameters()))
    assert same == (tune == "head")


def test_the_loss_is_the_cross_entropy_at_labelled_places_alone(nano):
    beginnings, net = toy(3), RewardNet(nano)
    texts = beginnings.replies.texts
    batch = Batch(
        torch.from_numpy(texts.ids.reshape(3, 5)).long(), torch.full((3,), 5), torch.full((3,), 2), np.arange(3)
    )
    with torch.no_grad():
        logits = net(batch.ids)
        told = [
            torch.nn.functional.softplus(-logits[i, p] if r else logits[i, p])
            for i, r in enumerate(beginnings.replies.right)
            for p in (2, 4)
        ]
        assert torch.allclose(loss_of(net, beginnings, batch), torch.stack(told).mean(), atol=1e-6)


async def compare(reward: EngineEndpoint, replies: Replies, expected: list[np.ndarray], bound: float) -> None:
    """Hold the engine's score at every place of the replies, the prompt's end included, against the trainer's."""
    c = Context(Run([reward], 1), "p0")
    for i in range(len(replies)):
        problem, first = replies.problems[replies.problem_of[i]], replies.texts.begins[i]
        ids = replies.texts.text(i)[first:].tolist()
        assert np.ptp(expected[i]) > 0.02, "scores that do not vary would show nothing"
        for place in range(len(ids) + 1):
            begun = Sample(0, "", place, "length", "nano", reward.vocabulary, tuple(ids[:place]))
            found = await c.score(reward, problem.messages, begun)
            assert abs(found.reward - expected[i][first + place - 1]) < bound
    charged = c.ledger.by_endpoint()["prm"]
    assert charged["cached"] > charged["uncached"] > 0 == charged["generated"] + charged["discarded"]


def test_the_engine_scores_as_the_trainer_does_and_searches_take_the_folder(tmp_path, tokenizer):
    """The engine reads most of each beginning from its prefix cache, and scores to 2e-3 what the trainer does."""
    folder = tmp_path / "prm"
    record = train(Plan(TASK, replies=32, each=4, held_out=16, epochs=1), "nano", folder, say=lambda text: None)
    assert json.loads((folder / "reward.json").read_text())["after"] == json.loads(json.dumps(record["after"]))
    net = load(folder)
    replies = sample_replies(net.trunk, tokenizer, TASK, 4, 1, "test", 3, say=lambda text: None)
    config = EngineConfig.of(model=str(folder), device="cpu", max_model_len=512, cpu_cache_bytes=1 << 25)
    reward, writer = EngineEndpoint(config, "prm"), engine()
    assert reward.caps.reward and not reward.caps.writes

    async def main() -> None:
        async with opened([writer, reward]):
            await compare(reward, replies, scores(net, replies), 2e-3)
            with torch.no_grad():  # the control: one weight of the head
                net.score_E[0] += 1.0
            with pytest.raises(AssertionError):
                await compare(reward, replies, scores(net, replies), 2e-3)
            problems = [Problem(f"p{i}", p.messages) for i, p in enumerate(replies.problems[:2])]
            for spec in ("beam:N=4,width=2,steps=2", "best_of_n:n=2,by=prm"):
                solution = await solve(load_strategy(f"{spec},prm=prm"), problems, [writer, reward], name=spec)
                assert all(s.result.sample for s in solution.solved)
                assert {c.endpoint for c in solution.ledger.charges if c.kind == "score"} == {"prm"}

    asyncio.run(main())
    asked = f"beam:prm={folder}"
    job = Job((asked, "majority:n=2"), ("nano",), TASK)
    job = dataclasses.replace(job, rewards=missing_rewards(job, map(load_strategy, job.strategies)))
    built = build_endpoints(job, EngineConfig.of(device="cpu"))
    assert job.rewards == (str(folder),) and [e.name for e in built] == ["nano", "prm"]
    load_strategy(asked).check(built, None)
    assert not missing_rewards(dataclasses.replace(job, models=("nano", "elsewhere/prm")), [load_strategy(asked)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype, bound", [("float32", 2e-3), ("bfloat16", 3e-2)])
def test_a_gpu_trains_and_scores_alike(tmp_path, tokenizer, dtype, bound):
    """In fp32 the bound is that of the CPU; bf16 rounds every state, so its bound is wider."""
    folder = tmp_path / "prm"
    plan = Plan(TASK, "rollouts", replies=256, each=4, held_out=64, epochs=2)
    assert train(plan, "nano", folder, say=lambda text: None, device="cuda")["after"]["auc"] is not None
    net = load(folder, "cuda")
    replies = sample_replies(net.trunk, tokenizer, TASK, 4, 1, "test", 3, say=lambda text: None)
    own = {"device": "cuda", "dtype": dtype, "gpu_memory_utilization": 0.2}
    reward = EngineEndpoint(EngineConfig.of(model=str(folder), max_model_len=512, **own), "prm")

    async def main() -> None:
        async with opened([reward]):
            await compare(reward, replies, scores(net, replies), bound)

    asyncio.run(main())


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no score\.weight"):
        load(checkpoint.resolve("nano"))
    with pytest.raises(ConfigError, match="tune is all or head"):
        Plan(tune="half")


# ---------------------------------------------------------------------------------------------------- self-evaluation


def test_self_evaluation_learns_the_answer_alone_with_the_chance_of_its_label(replies, nano, tokenizer):
    beginnings = label(replies, "restart", nano, tokenizer)
    made = self_evaluation.documents(beginnings, tokenizer, 0)
    yes, no, end = (tokenizer.encode(word, add_special_tokens=False).ids for word in ("Yes", "No", "<|im_end|>"))
    assert len(made) == sum(map(len, replies.lines)) + sum(map(len, replies.between))
    answers = [made.ids[a:b][made.trained[a:b]].tolist() for a, b in zip(made.bounds[:-1], made.bounds[1:])]
    assert all(told in (yes + end, no + end) for told in answers)
    share, expected = np.mean([told == yes + end for told in answers]), np.nanmean(beginnings.label)
    assert abs(share - expected) < 0.12


def test_the_self_evaluation_is_a_model_that_writes(tmp_path):
    plan = self_evaluation.Plan(TASK, rank=2, steps=3, rows=1, replies=8, each=4, held_out=8, length=256)
    record = self_evaluation.train(plan, "nano", tmp_path / "self", say=lambda text: None)
    assert record["history"] and export.load(tmp_path / "self").shape == export.load(checkpoint.resolve("nano")).shape


def test_a_rater_learns_the_digit_of_each_line_s_label(replies, nano, tokenizer):
    """The prompt is the one that SpecReason asks with, and only the digit and the end mark are learnt."""
    told = label(replies, "rollouts", nano, tokenizer, k=2)
    made = self_evaluation.ratings(told, tokenizer)
    expected = [
        str(round(9 * float(told.label[begin + place])))
        for i, begin in enumerate(replies.texts.bounds[:-1])
        for place in replies.lines[i]
    ]
    learnt = [made.ids[a:b][made.trained[a:b]].tolist() for a, b in zip(made.bounds[:-1], made.bounds[1:])]
    end = tokenizer.token_to_id("<|im_end|>")
    assert len(set(expected)) > 1 and [tokenizer.decode(ids[:-1]) for ids in learnt] == expected
    assert all(len(ids) == 2 and ids[1] == end for ids in learnt)
    problem, first = replies.problems[replies.problem_of[0]], int(replies.lines[0][0])
    asked = Prompts().rate_step(Problem("p", problem.messages), replies.written(tokenizer, 0, first))
    ids = made.ids[: made.bounds[1]].tolist()
    assert tokenizer.encode(prompt(asked), add_special_tokens=False).ids == ids[: len(ids) - 2]
