"""Every trainer computes what the engine serves from the folder that it writes, to 2e-3.

Each test has a control: after one weight was changed, or with the weights from before, the rows must differ. Trainers
with such a test of their own: adapters (`test_adapters`), experts (`test_experts`), hybrids (`test_hybrid`), healing
(`test_healing`), `prm` (`test_rewards`), `pair_rl` (`test_pair_rl`), `ppd` (`speculation/test_ppd`), the adapter of
`idlm` (`speculation/test_idlm_trainer`), and the learner (`learn/test_learning`, `learn/test_packed`).
"""

from __future__ import annotations

import copy

import pytest
import torch

from kvasir.models import checkpoint
from kvasir.speculation.drafters.eagle import EagleDrafter
from kvasir.speculation.drafters.idlm import MaskDrafter
from kvasir.speculation.drafters.medusa import MedusaDrafter
from kvasir_lab import export
from kvasir_lab.adapters import reward
from kvasir_lab.drafters import mask_rows
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.kind import DRAFTERS, MODELS, Kind
from kvasir_lab.drafters.target import Target
from kvasir_lab.drafters.training import Plan, Trainer
from kvasir_lab.forms import YES_NO, FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.rewards import self_evaluation
from tests.engine.driver import Driver
from tests.lab import test_train
from tests.lab.test_exits_training import target, texts  # noqa: F401 (fixtures)
from tests.speculation.test_layer_skip import Judged

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 2e-3
TEXTS = [[(37 * i + 11 * k) % 600 + 20 for i in range(length)] for k, length in enumerate((9, 30, 47))]
TASK = "chain:min_steps=1,max_steps=2"


def driver(folder, drafter: str = "", **options) -> Driver:
    return Driver(str(folder), **{"max_model_len": 96, "drafter": drafter, "draft_control": "fixed"} | options)


def requests(d: Driver, **params) -> list:
    given = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    return [d.request(f"r{k}", ids, **given) for k, ids in enumerate(TEXTS)]


def rounded(module: torch.nn.Module) -> None:
    """Give a trained module the weights that its file will hold."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16())


def spoilt(kind: Kind, weight: str) -> Kind:
    """The same kind with one other number in a weight."""
    other = copy.copy(kind)
    other.module = copy.deepcopy(kind.module)
    with torch.no_grad():
        other.module.get_parameter(weight).view(-1)[0] += 2.0
    return other


@torch.enable_grad()
def run_of(target: Target, texts, spec: str, package: str) -> Kind:  # noqa: F811
    """Train for four steps and round the result as it is written."""
    run = Trainer(target, texts, Plan(spec, package, steps=4, lr=4e-3))
    stream = run.stream()
    for _ in range(4):
        run.step(next(stream))
    rounded(run.kind.module)
    return run.kind


def served(folder) -> list[torch.Tensor]:
    """The engine's log-probability of every token of TEXTS but the first, as a prompt in chunks."""
    d = driver(folder, max_num_batched_tokens=24)
    d.run(requests(d, max_tokens=1, prompt_logprobs=0))
    found = [torch.tensor([p.logprob for p in d.outputs[f"r{k}", 0].prompt_logprobs[1:]]) for k in range(len(TEXTS))]
    d.close()
    return found


def distance(found: list[torch.Tensor], rows) -> float:
    """Largest distance in nats from ``rows`` (ids [1, T] -> log-probabilities [1, T, V]), the trainer's."""
    worst = 0.0
    with torch.no_grad():
        for ids, told in zip(TEXTS, found, strict=True):
            right = rows(torch.tensor([ids]))[0, :-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            worst = max(worst, float((told - right).abs().max()))
    return worst


# -------------------------------------------------------------------------------------------------------- whole models


def test_a_model_of_the_lab(tokenizer, tmp_path):
    run = test_train.trainer(tokenizer, steps=4)
    test_train.go(run, tmp_path)
    model = run.model.eval()
    rounded(model)
    export.export(model, tokenizer, tmp_path / "out")
    found, rows = served(tmp_path / "out"), lambda ids: model(ids).log_softmax(-1)
    assert distance(found, rows) < CLOSE
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] += 2.0
    assert distance(found, rows) > CLOSE


ROWS = {
    "exits": lambda kind, ids: kind.logits(list(kind.outputs(ids))[-1]).log_softmax(-1),
    "medusa2:data=text,warmup=0": lambda kind, ids: kind.logits(kind.normed(ids)).log_softmax(-1),
    "idlm": lambda kind, ids: kind.log_probs(kind.text(ids)[0]),
}


@pytest.mark.parametrize("spec", ROWS)
def test_whole_models_that_draft_for_themselves(spec, target, texts, tokenizer, tmp_path):  # noqa: F811
    kind = run_of(target, texts, spec, MODELS)
    kind.write(tmp_path, tokenizer)
    found, rows = served(tmp_path), ROWS[spec]
    assert distance(found, lambda ids: rows(kind, ids)) < CLOSE
    last = ("backbone." if spec.startswith("medusa2") else "") + "model.layers.3.mlp.down_proj.weight"
    other = spoilt(kind, last)
    assert distance(found, lambda ids: rows(other, ids)) > CLOSE


# --------------------------------------------------------------------------------------------------------------- drafts


@torch.no_grad()
def test_exits_draft_with_the_trained_chances(target, texts, tokenizer, tmp_path):  # noqa: F811
    """The engine's drafts of each exit are the likeliest tokens of the trainer's exit, with its probabilities."""
    kind = run_of(target, texts, "exits:curriculum=all", MODELS)
    kind.write(tmp_path, tokenizer)
    d = driver(tmp_path, "layer_skip:exits=1+2+3", max_num_seqs=3)
    drafter, turn = d.engine.proposals.drafting.drafter, iter(range(10_000))
    drafter._choose = lambda seqs: (1 + next(turn) % 3, 5)
    heard = Judged(d)
    d.run(requests(d), preempt_every=5)
    d.close()
    other, checked, missed = spoilt(kind, "model.layers.0.mlp.down_proj.weight"), 0, 0
    for seq, first, after, tokens, sure in heard.drafted:
        ids = torch.tensor([[*seq.tokens[:first], *tokens]])
        right, wrong = (k.logits(list(k.outputs(ids))[after - 1][0]).softmax(-1) for k in (kind, other))
        for i, (token, chance) in enumerate(zip(tokens, sure)):
            row = first - 1 + i
            assert abs(chance - float(right[row, token])) < CLOSE and chance > float(right[row].max()) - CLOSE
            checked, missed = checked + 1, missed + (abs(chance - float(wrong[row, token])) > CLOSE)
    assert checked > 20 and missed > checked // 4, (checked, missed)


def of_head(kind: Kind, ids: list[int], root: int) -> list[torch.Tensor]:
    """Chances [V] of each step of a head from the row ``root``."""
    batch = Batch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([2]), None)
    return [kind.target.logits(x[0, root]).softmax(-1) for x in kind.outputs(batch)[1]]


def of_joint_heads(kind: Kind, ids: list[int], root: int) -> list[torch.Tensor]:
    return [kind.logits(x).softmax(-1) for x in kind.module.head(kind.normed(torch.tensor([ids])))[0, root]]


HEADS = {
    "medusa": (DRAFTERS, MedusaDrafter, of_head, "weight", ""),
    "eagle": (DRAFTERS, EagleDrafter, of_head, None, ",width=1"),
    "medusa2:data=text,warmup=0": (MODELS, MedusaDrafter, of_joint_heads, "head.weight", ""),
}


@pytest.mark.parametrize("spec", HEADS)
@torch.no_grad()
def test_heads_draft_with_the_trained_chances(spec, target, texts, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    """Over the states that the engine hands over, behind prompts in chunks, preemptions and drafts of every length.

    Estimates of a tree are those of each token; a chain of ``eagle`` goes on from its own tokens.
    """
    package, drafter, chances, weight, options = HEADS[spec]
    export.export(target.source, tokenizer, tmp_path)
    kind = run_of(Target(export.load(tmp_path), "tiny"), texts, spec, package)
    if package == MODELS:
        kind.write(tmp_path, tokenizer)
    else:
        kind.write(tmp_path / "medusa", None)
    heard, real = [], drafter.propose

    def record(self, asks):
        trees = real(self, asks)
        heard.extend((list(ask.seq.tokens), tree) for ask, tree in zip(asks, trees) if len(tree))
        return trees

    monkeypatch.setattr(drafter, "propose", record)
    name = "eagle" if spec == "eagle" else "medusa"
    d = driver(tmp_path, f"{name}:model={tmp_path / 'medusa'}{options}", max_num_batched_tokens=24)
    d.run(requests(d), preempt_every=5)
    assert not d.engine.proposals.drafting._failures
    d.close()
    weight = weight or next(n for n, p in kind.module.named_parameters() if p.ndim == 2)
    other, checked, missed = spoilt(kind, weight), 0, 0
    for tokens, tree in heard:
        path = tree.tokens if tree.is_chain else []  # where a step depends on the one before, the tree is a chain
        right, wrong = (chances(k, [*tokens, *path], len(tokens) - 2) for k in (kind, other))
        depth: dict[int, int] = {-1: -1}
        for node, (parent, token, est) in enumerate(zip(tree.parents, tree.tokens, tree.est)):
            depth[node] = depth[parent] + 1
            assert abs(est - float(right[depth[node]][token])) < CLOSE
            checked, missed = checked + 1, missed + (abs(est - float(wrong[depth[node]][token])) > CLOSE)
    assert checked > 30 and missed > checked // 10, (checked, missed)


@torch.no_grad()
def test_a_converted_model_drafts_with_trained_chances(target, texts, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    """The mask rows of a model trained as a whole are those of its loss."""
    kind = run_of(target, texts, "idlm", MODELS)
    kind.write(tmp_path, tokenizer)
    heard, real = [], MaskDrafter.answer

    def record(self, seq, tree, node, guesses):
        heard.append((list(seq.tokens), guesses))
        real(self, seq, tree, node, guesses)

    monkeypatch.setattr(MaskDrafter, "answer", record)
    d = driver(tmp_path, "idlm", max_num_batched_tokens=64)
    d.run(requests(d), preempt_every=5)
    assert not d.engine.proposals.drafting._failures
    d.close()
    other, checked, missed = spoilt(kind, "model.layers.3.mlp.down_proj.weight"), 0, 0
    for tokens, guesses in heard:
        if not guesses:
            continue
        begin, masks = len(tokens) - 1, len(guesses)  # masks stand where the last token stands, and behind it
        ids = torch.tensor([[*tokens, *[0] * masks]])
        batch = Batch(ids, torch.tensor([begin + masks + 1]), torch.tensor([begin]), None)
        rows = mask_rows.layout(batch, masks, torch.tensor([-begin % masks]), ids.device)
        right, wrong = (k.log_probs(k.masks(rows, k.text(ids)[1]))[0].exp() for k in (kind, other))
        for j, (token, chance) in enumerate(row[0] for row in guesses):
            assert abs(chance - float(right[j, token])) < CLOSE
            checked, missed = checked + 1, missed + (abs(chance - float(wrong[j, token])) > CLOSE)
    assert checked > 10 and missed > checked // 4, (checked, missed)


# --------------------------------------------------------------------------------------------------------------- judges


def believed(folder, cases, tokenizer) -> list[float]:
    """The engine's P(Yes), of Yes and No, after each case."""
    answers = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in YES_NO[::-1]]
    d = Driver(str(folder), num_pages=512)
    for i, case in enumerate(cases):
        ids = tokenizer.encode(case.prompt, add_special_tokens=False).ids
        for answer in answers:
            name = f"{i} {answer}"
            d.run([d.request(name, [*ids, answer], temperature=0.0, max_tokens=1, prompt_logprobs=0)])
    nats = [[d.outputs[f"{i} {a}", 0].prompt_logprobs[-1].logprob for a in answers] for i in range(len(cases))]
    d.close()
    return [float(torch.tensor(pair).softmax(0)[0]) for pair in nats]


@pytest.mark.parametrize("name", ["judge", "self_eval"])
def test_judges_believe_what_the_trainer_measures(name, tokenizer, tmp_path):
    """Both are a LoRA that is merged into the model. Control: the beliefs before training."""
    nano, out, silent = checkpoint.resolve("nano"), tmp_path / "out", lambda text: None
    if name == "judge":
        reward.train(reward.Plan(TASK, rank=4, steps=6, rows=2, count=8, length=256), nano, out, say=silent)
        cases = load_task(f"judge_step/{TASK}").problems("test", 0, 4)
    else:
        plan = self_evaluation.Plan(TASK, rank=4, steps=6, rows=2, replies=8, each=4, held_out=8, length=256)
        self_evaluation.train(plan, "nano", out, say=silent)
        task = load_task(TASK)
        form = FormTask("self_evaluate", task)
        cases = [form.case(p, [p.solution[: len(p.solution) // 2]]) for p in task.problems("test", 0, 4)]
    found, right, before = believed(out, cases, tokenizer), reward.beliefs(out, cases), reward.beliefs(nano, cases)
    assert found == pytest.approx(right, abs=CLOSE)
    assert max(abs(a - b) for a, b in zip(found, before)) > CLOSE
