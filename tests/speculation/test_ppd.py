"""Prompt tokens: the engine computes what training did, the tree is the best possible, and all bounds hold."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads
from kvasir.speculation.controller import Controller
from kvasir.speculation.drafters.ppd import PromptDrafter, dynamic_tree
from kvasir.speculation.head_kinds.ppd import Prompts, PromptShape
from kvasir.speculation.router import Router
from kvasir.speculation.tree import DraftTree, products
from kvasir_lab import export
from kvasir_lab.drafters import prompt_rows
from kvasir_lab.drafters.data import Batch
from tests.checkpoints import write
from tests.engine.driver import Driver
from tests.speculation.helpers import WithGuests, driver, install, outputs, plain, requests


def folder_of(head: Prompts, folder, seed: int = 0):
    """Return random prompt tokens for nano, as loud as its embeddings."""
    model = export.load(resolve("nano")).model
    head.begin_with(model.norm.weight, model.embed_tokens.weight.detach().float(), torch.Generator().manual_seed(seed))
    size, dim = model.embed_tokens.weight.shape
    heads.write(
        head,
        folder,
        {
            "name": "nano",
            "hidden_size": dim,
            "vocab_size": size,
            "num_layers": 4,
            "weights": heads.fingerprint(model.norm.weight),
        },
    )
    return folder


@pytest.mark.parametrize("ensemble", [1, 2])
@torch.no_grad()
def test_the_engine_guesses_what_training_does(ensemble, tmp_path, monkeypatch):
    """Guesses in trees, in chunks and after preemptions come from the states that the loss was computed from, at the
    right positions. A prompt's last row has guests, too."""
    folder_of(Prompts(PromptShape(192, ensemble=ensemble)), tmp_path)
    heard = []
    real = PromptDrafter.answer

    def record(self, seq, tree, node, rows):
        heard.append((list(seq.tokens), rows, len(seq.tokens) == seq.num_prompt + 1))
        real(self, seq, tree, node, rows)

    monkeypatch.setattr(PromptDrafter, "answer", record)
    d = driver(f"ppd:model={tmp_path},rows={12 * ensemble}", max_num_batched_tokens=48)
    d.run(requests(d, 0.0, allowed_token_ids=None), preempt_every=4)
    assert not d.engine.proposals.drafting._failures and outputs(d) == plain(0.0, allowed_token_ids=None)
    head, _ = heads.read("ppd", tmp_path)
    model, num, missed = export.load(resolve("nano")), 0, 0
    assert any(first for _, _, first in heard) == (ensemble == 1)
    for tokens, rows, _ in heard[::7] + [entry for entry in heard if entry[2]][:1]:
        count = len(rows) // ensemble
        ids = torch.tensor([[*tokens[:-1], 0, 0, 0, 0]])  # the row before the last token is the root
        batch = Batch(ids, torch.tensor([ids.shape[1]]), torch.tensor([len(tokens) - 1]), None)
        for c in range(ensemble):  # members do not see each other
            own = head.weight[c : c + 1]
            other = own + torch.eye(1, own.shape[-1])  # the control: one weight of each prompt token
            text = prompt_rows.read(model, ids)[1]
            states, spoilt = (prompt_rows.unroll(model, weight, batch, text) for weight in (own, other))
            for x, y, row in zip(states, spoilt, rows[c * count : (c + 1) * count]):
                logits = torch.nn.functional.linear(x[0, len(tokens) - 2], model.model.embed_tokens.weight)
                chances = logits.softmax(-1)
                chosen = torch.tensor([token for token, _ in row])
                found = torch.tensor([chance for _, chance in row])
                torch.testing.assert_close(found, chances[chosen], rtol=2e-3, atol=2e-3)
                torch.testing.assert_close(found, chances.topk(len(row)).values, rtol=2e-3, atol=2e-3)
                wrong = torch.nn.functional.linear(y[0, len(tokens) - 2], model.model.embed_tokens.weight).softmax(-1)
                missed += not torch.allclose(found, wrong[chosen], rtol=2e-3, atol=2e-3)
        num += count
    assert num > 12 and missed > num // 4
    d.close()


def worth(tree: DraftTree, count: int, carried: dict[int, int], gains: list[float]) -> float:
    chance = {-1: 1.0}
    for node in range(count):
        chance[node] = chance[tree.parents[node]] * tree.est[node]
    total = sum(chance.values()) - 1
    for node, num in carried.items():
        ends = chance[node] - sum(chance[i] for i in range(count) if tree.parents[i] == node)
        total += ends * sum(gains[:num])
    return total


@pytest.mark.parametrize("rows, ensemble", [(3, 1), (5, 1), (7, 1), (8, 2)])
def test_the_dynamic_tree_is_the_best_there_is(rows, ensemble):
    """The tree is compared with every number of candidates and every distribution of prompt tokens over them."""
    tree, gains = products([[0.6, 0.3], [0.5, 0.1]], [[1, 2], [3, 4]], 4, 2), [0.5, 0.3]
    count, carried = dynamic_tree(tree, gains, rows, ensemble)
    assert count + ensemble * sum(carried.values()) <= rows and all(-1 <= node < count for node in carried)
    best = max(
        worth(tree, n, dict(zip(range(-1, n), spread)), gains)
        for n in range(len(tree) + 1)
        for spread in itertools.product(range(3), repeat=n + 1)
        if n + ensemble * sum(spread) <= rows
    )
    assert worth(tree, count, carried, gains) == pytest.approx(
        best, abs=0.02 * rows
    )  # what is worth next to nothing is left out
    assert dynamic_tree(DraftTree(), gains, rows, ensemble) == (0, {-1: 2})


def test_what_a_step_may_hold_bounds_candidates_and_guests():
    tree = DraftTree.chain([5, 6, 7], 0.9)
    tree.guests = {node: ((0, 1, 2),) for node in range(-1, 3)}
    assert tree.num_rows == 15
    fixed = Controller(lambda *_: 1.0, fixed=True)
    for budget, nodes, rows in ((15, 3, 15), (14, 2, 11), (7, 1, 7), (6, 0, 3), (2, 0, 2)):
        (kept,) = fixed.allocate([tree], 100, budget)
        assert (len(kept), kept.num_rows) == (nodes, rows), budget
    seen = []

    def seconds(num_seqs, context, rows, drafted):
        seen.append(rows)
        return 1.0 + 0.05 * rows

    paid = Controller(seconds)
    (kept,) = paid.allocate([tree], 100, 50)
    assert 3 in seen and 15 in seen and not {1, 2, 4, 5, 6} & set(seen), "guests are part of the price"
    assert len(kept) == 3 and len(paid.allocate([tree], 100, 5)[0]) == 0


def test_a_kept_tree_takes_its_guests_along():
    tree = DraftTree()
    a, b = tree.add(-1, 5, 0.2), tree.add(-1, 6, 0.7)
    tree.guests = {-1: ((9,),), a: ((1, 2),), b: ((3,), (4,))}
    kept = tree.keep(range(2))
    assert kept.tokens == [6, 5] and kept.guests == {-1: ((9,),), 0: ((3,), (4,)), 1: ((1, 2),)} and kept.num_rows == 7
    assert kept.trunk().guests == {-1: ((9,),), 0: ((3,), (4,))}


def test_guests_find_no_place_beyond_the_context():
    """Requests run up to the last position, and in a pool that has room for nothing else."""
    found = []
    for guests in (False, True):
        d = driver("replay", max_model_len=48, num_pages=4, max_num_seqs=1)
        if guests:
            told = {(r, b): tokens for (r, b), (tokens, _) in found[0].items()}
            install(d, WithGuests(told, d.engine.runner.model.spec.hidden_size))
        d.run([d.request("r", list(range(300, 330)), temperature=0.0, max_tokens=18, ignore_eos=True, logprobs=0)])
        assert guests is False or d.engine.proposals.drafting.drafter.rows > 0
        found.append(outputs(d))
        d.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("variant, exact", [("gemma3_text", True), ("qwen3_moe", True), ("qwen3", False)])
def test_windows_experts_scaled_embeddings_and_normal_mode(variant, exact, tmp_path):
    """Guests are inputs of the first layer, so no embedding scale applies. Steps without them are native or taped in
    normal mode."""
    folder, found = write(tmp_path, variant), []
    for guests in (False, True):
        d = Driver(
            str(folder),
            drafter="replay",
            draft_control="fixed",
            max_model_len=96,
            skip_tokenizer_init=True,
            batch_invariant=exact,
        )
        prompts = [[(7 * i + 5 * k) % 97 for i in range(9 + 8 * k)] for k in range(3)]
        if guests:
            install(
                d, WithGuests({key: out for key, (out, _) in found[0].items()}, d.engine.runner.model.spec.hidden_size)
            )
        d.run(
            [
                d.request(f"r{k}", ids, temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=0)
                for k, ids in enumerate(prompts)
            ]
        )
        assert not guests or d.engine.proposals.drafting.drafter.rows > 10 and d.engine.stats().accepted_tokens > 5
        found.append(outputs(d) if exact else {key: (out, None) for key, (out, _) in outputs(d).items()})
        d.close()
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_broken_prompt_tokens_and_rows_are_refused(tmp_path):
    head = Prompts(PromptShape(192))
    folder_of(head, tmp_path / "a")
    with pytest.raises(ConfigError, match="rows=2"):
        driver(f"ppd:model={tmp_path / 'a'},rows=2")
    with torch.no_grad():
        head.weight[0, 1, 3] = float("nan")
    facts = json.loads((tmp_path / "a" / "config.json").read_text())["target"]
    heads.write(head, tmp_path / "b", facts)
    with pytest.raises(ConfigError, match="NaN.*kvasir train drafter ppd"):
        driver(f"ppd:model={tmp_path / 'b'}")


def test_two_drafters_with_rows_of_their_own_are_refused():
    def fake(name):
        return SimpleNamespace(
            name=name,
            place="cpu",
            topology="tree",
            top_tokens=0,
            hidden_layers=(),
            follows=False,
            guests=torch.zeros(1, 4),
            attach=lambda model, capture=None: None,
        )

    with pytest.raises(ConfigError, match="a and b both"):
        Router([fake("a"), fake("b")]).attach(None)


def test_rows_follow_from_step_times(tmp_path):
    """Where rows are free the tree is the largest, where each costs a step the smallest; a set number stays."""
    folder, found = folder_of(Prompts(PromptShape(192)), tmp_path), {}
    for name, row, options in (("free", 0.0, ""), ("dear", 1.0, ""), ("set", 0.0, ",rows=9")):
        d = driver(f"ppd:model={folder}{options}", max_num_batched_tokens=512)
        drafter = d.engine.proposals.drafting.drafter
        drafter.use_times(lambda n, context, rows, drafted, row=row: 1.0 + row * rows)
        d.run(requests(d, 0.0))
        found[name] = drafter._rows
        d.close()
    assert found["free"] > 16 and found["dear"] == 6 and found["set"] == 9, found
