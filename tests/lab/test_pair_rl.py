"""Training by pairs: its rewards, pairs and gradient, and that the engine judges with the trainer's numbers."""

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
from kvasir.scaling.strategy import load_strategy
from kvasir_lab import export
from kvasir_lab.forms import FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.rewards.pair import (
    Case,
    Plan,
    Rollouts,
    apart,
    fit,
    gradient,
    likelihoods,
    pairs,
    problems_of,
    rollouts,
    train,
)
from kvasir_lab.solving.job import Job, build_endpoints, missing_rewards
from tests.scaling.rewarded import Reward
from tests.scaling.tabular import Tabular

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = "chain:min_steps=1,max_steps=2"


@pytest.fixture(scope="module")
def nano():
    return export.load(checkpoint.resolve("nano"))


def written(cases: list[Case], rewards: list[list[int]]) -> Rollouts:
    """Replies to every case, right or wrong as ``rewards`` says; all texts differ."""
    texts, group, reward = [], [], []
    for number, (case, told) in enumerate(zip(cases, rewards)):
        for i, right in enumerate(told):
            answer = case.problem.answer if right else "-1"
            texts.append("1+1=2\n" * i + f"Answer: {answer}")
            group.append(number)
            reward.append(float(right))
    return Rollouts([[1]] * len(texts), [[2]] * len(texts), texts, np.array(group), np.array(reward))


def test_a_judgement_earns_only_if_both_ratings_are_near_the_truth():
    cases = problems_of([TASK], "train", 0, 1)
    (pair,) = pairs(cases, written(cases, [[1, 0]]), np.random.default_rng(0))
    right, wrong = ("A", "B") if pair.problem.right[0] else ("B", "A")

    def reward(high: int, low: int) -> float:
        given = {right: high, wrong: low}
        return pair.reward(f"a check good\nA: {given['A']}\nB: {given['B']}")

    assert [reward(9, 1), reward(9, 2), reward(8, 2)] == [1, 1, 1]
    assert [reward(7, 1), reward(9, 3), reward(2, 9), reward(9, 9)] == [0, 0, 0, 0], "sure and right, or nothing"
    assert pair.reward("A: 9") == pair.reward("") == 0
    one = apart([pair])
    assert [case.reward("Yes") for case in one] == [float(ok) for ok in pair.problem.right]


def test_every_pair_has_a_right_reply_and_half_have_two():
    cases = problems_of([TASK], "train", 0, 200)
    told = written(cases, [[1, 1, 0, 0]] * 200)
    found = pairs(cases, told, np.random.default_rng(0))
    both = [sum(case.problem.right) for case in found]
    assert len(found) == 200 and set(both) == {1, 2} and 70 < both.count(2) < 130
    first = [case.problem.right[0] for case in found if sum(case.problem.right) == 1]
    assert 0.3 < np.mean(first) < 0.7, "the order says nothing"
    assert not pairs(cases, written(cases, [[0, 0, 0]] * 200), np.random.default_rng(0)), "nothing to gain by bad ones"


def test_a_group_that_agrees_teaches_nothing_and_the_others_are_normalised():
    found = Rollouts(
        [[1]] * 6, [[2]] * 6, [""] * 6, np.array([0, 0, 0, 1, 1, 1]), np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    )
    told = found.advantages()
    assert not told[:3].any() and told[3] > 0 > told[4]
    assert told[3:].mean() == pytest.approx(0) and told[3:].std() == pytest.approx(1)


def test_the_gradient_is_that_of_the_rewarded_log_probabilities(nano):
    """Against autograd on the whole logits; a wrong sign or a shifted row would differ."""
    net = export.load(checkpoint.resolve("nano")).requires_grad_(True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(9, 99, n).tolist() for n in (4, 4, 7)]
    replies = [rng.integers(9, 99, n).tolist() for n in (3, 5, 2)]
    found = Rollouts(prompts, replies, [""] * 3, np.zeros(3, int), np.array([1.0, 0.0, 0.0]))
    gradient(net, found, 0.5)
    told = net.model.layers[1].mlp.up_proj.weight.grad.clone()
    net.zero_grad()
    total = torch.zeros(())
    for prompt, reply, advantage in zip(prompts, replies, found.advantages()):
        rows = net(torch.tensor([[*prompt, *reply]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = total - 0.5 * advantage * rows[torch.arange(len(reply)), reply].sum() / 10
    total.backward()
    expected = net.model.layers[1].mlp.up_proj.weight.grad
    assert (told - expected).abs().max() < 1e-4 * expected.abs().max()


def parity(folder, tokenizer, dtype: str, device: str, trained=None) -> float:
    """The largest distance in nats a token between the engine's scores of judgements and the trainer's.

    ``trained``: the folder that the trainer's weights are read from, if it is another one.
    """
    net, task = export.load(trained or folder, device), load_task(TASK)
    problems = task.problems("test", 1, 3)
    form = FormTask("judge_pair", task)
    cases = [Case(form, form.case(p, [p.solution, "Answer: 3"])) for p in problems]
    told, worst = rollouts(net, tokenizer, cases, 1, 0), []
    own = {"device": device, "dtype": dtype, "gpu_memory_utilization": 0.2}  # studies may share the GPU
    own |= {"cpu_cache_bytes": 1 << 25} if device == "cpu" else {}
    endpoint = EngineEndpoint(EngineConfig.of(model=str(folder), max_model_len=512, **own), "judge")

    async def main() -> None:
        async with opened([endpoint]):
            context = Context(Run([endpoint]), "p0")
            for g, ids, nats in zip(told.group, told.replies, likelihoods(net, told)):
                reply = Sample(0, "", len(ids), "stop", "judge", endpoint.vocabulary, tuple(ids))
                found = await context.score(endpoint, cases[g].problem.messages, reply)
                worst.append(abs(found.logprob - nats) / len(ids))

    asyncio.run(main())
    return max(worst)


@pytest.mark.slow
def test_a_trained_judge_is_a_model_that_the_engine_scores_as_the_trainer_does(tmp_path, tokenizer):
    folder = tmp_path / "pair"
    plan = Plan((TASK,), steps=1, problems=1, group=2, held_out=2)
    record = train(plan, "nano", folder, say=lambda text: None)
    assert json.loads((folder / "reward.json").read_text()) == json.loads(json.dumps(record))
    assert record["after"][TASK]["right"] >= 0 and record["history"][0]["step"] == 1
    assert parity(folder, tokenizer, "float32", "cpu") < 2e-3
    other = export.load(folder)
    with torch.no_grad():
        other.model.norm.weight[0] += 20.0
    export.export(other, tokenizer, tmp_path / "other")
    assert parity(folder, tokenizer, "float32", "cpu", tmp_path / "other") > 2e-3, "one weight shows"


def test_training_ends_after_its_minutes_with_fewer_steps(tokenizer, capsys):
    plan = Plan((TASK,), judge="none", steps=50, problems=1, group=2, held_out=2, minutes=1e-4)
    net = export.load(checkpoint.resolve("nano"))
    history = fit(net, tokenizer, plan)
    assert len(history) == 1 and 1 <= (done := history[0]["step"]) < 5
    assert f"pair_rl {done}/{done} right " in capsys.readouterr().out, "the progress ends when the training does"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype, bound", [("float32", 2e-3), ("bfloat16", 3e-2)])
def test_a_gpu_trains_and_scores_alike(tmp_path, tokenizer, dtype, bound):
    folder = tmp_path / "pair"
    train(Plan((TASK,), steps=3, problems=8, held_out=16), "nano", folder, say=lambda text: None, device="cuda")
    assert parity(folder, tokenizer, dtype, "cuda") < bound


def test_a_judge_is_named_by_its_folder_and_writes_no_solutions():
    folder = str(checkpoint.resolve("base"))
    strategies = [load_strategy(f"v1:judge={folder}"), load_strategy("cascade")]
    job = Job(("v1", "cascade"), ("nano",), TASK)
    job = dataclasses.replace(job, rewards=missing_rewards(job, strategies))
    built = build_endpoints(job, EngineConfig.of(device="cpu"))
    assert job.rewards == (folder,) and [e.caps.writes for e in built] == [True, False]
    strategies[0].check(built, None)
    assert [e.name for e in strategies[1].endpoints(built)] == ["nano"], "a judge is no tier"
    assert not missing_rewards(dataclasses.replace(job, models=("nano", "base")), strategies)
    with pytest.raises(ConfigError, match="writes no ratings"):
        load_strategy("v1:judge=prm").check([Tabular("small"), Reward()], None)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"judge": "three"}, "judge=three"),
        ({"group": 1}, "group must be at least 2"),
        ({"tasks": ("story",)}, "no solutions to judge"),
        ({"tasks": ("chain", "path"), "problems": 1}, "at least 1 for each task"),
    ],
)
def test_what_cannot_be_trained_is_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        Plan(**options)
