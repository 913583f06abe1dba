"""I-DLM's mask rows with random, non-zero adapters: no token changes, and the mistakes that change one are noticed."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from kvasir.decoding import walk
from kvasir.engine.ways import batch
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.speculation.drafters.idlm import MaskDrafter
from kvasir.speculation.self_drafter import SelfDrafter
from kvasir_lab import export
from tests.speculation.helpers import driver, outputs, plain, requests
from tests.speculation.masks import PARTS, random_masks, tensors_of
from tests.speculation.test_mutations import REAL_WALK, guests_are_seen
from tests.speculation.test_state import prefilled, slots
from tests.speculation.test_state import run as run_watched


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_masks(tmp_path_factory.mktemp("masks") / "m")


@pytest.fixture(scope="module")
def expected():
    return {temperature: plain(temperature) for temperature in (0.0, 0.7, 1.0)}


def run(folder, temperature: float, layout: str = "tree", **options) -> dict:
    d = driver(f"idlm:model={folder},layout={layout}", **{"max_num_batched_tokens": 96, "check": False} | options)
    try:
        d.run(requests(d, temperature), preempt_every=5)
        assert not d.engine.proposals.drafting._failures and d.engine.stats().drafted_tokens > 20
        return outputs(d)
    finally:
        d.close()


@pytest.mark.parametrize("layout, temperature", [("chain", 0.0), ("tree", 0.7), ("chain", 1.0), ("tree", 1.0)])
def test_no_token_changes(layout, temperature, folder, expected):
    assert run(folder, temperature, layout) == expected[temperature]


REAL_VARIANTS = batch.row_variants


def adapter_on_the_anchor(span, out):
    REAL_VARIANTS(span, out)
    if span.guests:
        out[span.want["sample"].start] = span.seq.guest_variant


def a_mask_is_committed(span, held, sample, rows, tokens):
    """Emit what the mask behind the last draft drew, as if it were a draft."""
    path = REAL_WALK(span, held, sample, rows, tokens)
    return [*path, span.length - len(span.guests)] if span.guests and path[-1] == sample[-1] else path


MUTATIONS = {
    "the adapter computes the anchor's row": (batch, "row_variants", adapter_on_the_anchor),
    "keys and values of a mask are committed": (walk, "walk", a_mask_is_committed),
    "drafts see masks": (batch, "tree_ancestors", guests_are_seen),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name, folder, expected, monkeypatch):
    monkeypatch.setattr(*MUTATIONS[name])
    try:
        found = run(folder, 1.0)
    except AssertionError:  # of the engine's own: as good
        return
    assert found != expected[1.0], f"'{name}' changes nothing that the test sees"


@torch.no_grad()
def test_guesses_are_those_of_a_plain_forward(folder, monkeypatch):
    """Clean rows without the adapter, mask rows with it, one causal mask: in trees, in chunks, after preemptions, and
    behind prompts. Mutation: the adapter at the clean rows, too."""
    heard = []
    real = SelfDrafter.answer
    monkeypatch.setattr(
        SelfDrafter,
        "answer",
        lambda self, seq, tree, node, rows: (heard.append((list(seq.tokens), rows)), real(self, seq, tree, node, rows)),
    )
    d = driver(f"idlm:model={folder},layout=tree", max_num_batched_tokens=96)
    d.run(requests(d, 0.0, allowed_token_ids=None), preempt_every=4)
    d.close()
    loaded = export.load(resolve("nano"))
    tensors, scale = tensors_of(loaded, 4), 2.0
    gate = {}

    def gated(a, b):
        return lambda module, x, y: y + gate["rows"][:, None] * scale * (x[0] @ a.T @ b.T)

    for i, layer in enumerate(loaded.model.layers):
        for part in PARTS:
            name = f"base_model.model.model.layers.{i}.{part}"
            pair = (tensors[f"{name}.lora_{half}.weight"] for half in "AB")
            layer.get_submodule(part).register_forward_hook(gated(*pair))
    loaded.model.embed_tokens.register_forward_hook(
        lambda module, x, y: torch.where(gate["rows"][:, None] > 0, tensors["mask_embedding"], y)
    )
    checked, wrong = 0, 0
    for tokens, rows in heard[::5]:
        if not rows:
            continue
        clean = len(tokens) - 1  # the masks stand where the last token stands, and behind it
        gate["rows"] = torch.tensor([0.0] * clean + [1.0] * len(rows))
        ids = torch.tensor([[*tokens[:-1], *[0] * len(rows)]])
        chances = loaded(ids)[0].softmax(-1)[clean:]
        gate["rows"][clean - 1] = 1.0
        gate_off = loaded(ids)[0].softmax(-1)[clean:]
        for row, right, mutant in zip(rows, chances, gate_off):
            token, chance = row[0]
            assert token == int(right.argmax()) and abs(chance - float(right[token])) < 2e-3
            checked, wrong = checked + 1, wrong + (abs(chance - float(mutant[token])) > 2e-3)
    assert checked > 10 and wrong > 5


def test_committed_slots_are_those_of_a_prefill(folder, expected):
    d = driver(f"idlm:model={folder}", max_num_batched_tokens=64, max_num_seqs=4, check=False)
    seen = []
    given = requests(d, 1.0)[:2]
    run_watched(
        d,
        given,
        lambda seq: seen.append(
            (seq.request.id, seq.num_computed, slots(d.engine.runner.pool, seq.tables, seq.num_computed))
        ),
    )
    d.close()
    whole = {r.id: prefilled(list(r.prompt_ids) + d.outputs[r.id, 0].tokens, "plain") for r in given}
    assert len(seen) > 5
    for name, count, state in seen:
        assert all(torch.equal(part, whole[name][plane][:count]) for plane, part in state.items()), (name, count)


def proposals(folder, monkeypatch) -> tuple[int, int]:
    """Run requests one after the other on one seat. Returns the drafts proposed, and those guessed for others."""
    own, drafts = {}, []
    answer, tree_of = SelfDrafter.answer, MaskDrafter._tree

    def heard(self, seq, tree, node, rows):
        own.setdefault(seq.request.id, set()).add(tuple(row[0][0] for row in rows))
        answer(self, seq, tree, node, rows)

    def proposed(self, ask, *rest):
        tree = tree_of(self, ask, *rest)
        if tree.tokens:
            drafts.append((ask.seq.request.id, tuple(tree.tokens)))
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(SelfDrafter, "answer", heard)
        patch.setattr(MaskDrafter, "_tree", proposed)
        d = driver(f"idlm:model={folder}", max_num_seqs=1, check=False)
        d.run(requests(d, 1.0, logprobs=None, allowed_token_ids=None))
        d.close()
    wrong = [
        draft
        for name, draft in drafts
        if not any(known[: len(draft)] == draft for known in own.get(name, ()))
    ]  # fmt: skip
    return len(drafts), len(wrong)


def test_who_takes_over_a_seat_meets_no_drafts_of_the_one_before(folder, monkeypatch):
    drafted, wrong = proposals(folder, monkeypatch)
    assert drafted > 10 and not wrong
    by_seat = {}

    def keep(self, seq, tree, node, guesses):
        by_seat[seq.seat] = guesses

    monkeypatch.setattr(SelfDrafter, "answer", keep)
    monkeypatch.setattr(SelfDrafter, "guesses_of", lambda self, seq: by_seat.get(seq.seat, []))
    monkeypatch.setattr(MaskDrafter, "tail", (), raising=False)
    real = MaskDrafter.__init__

    def without_tail(self, config):
        real(self, config)
        self.tail_of_prompts, self.tail = self.tail, self.tail

    monkeypatch.setattr(MaskDrafter, "__init__", without_tail)
    monkeypatch.setattr(
        "kvasir.engine.drafts.drafting.Drafting.tail", lambda self: None
    )  # cold at first, as the paper's code
    assert proposals(folder, monkeypatch)[1], "state by seat is not noticed"


def test_tokens_add_up_and_follow_the_renewal_formula(folder, monkeypatch):
    """Guesses are right by a coin: verifying, rejecting and cold passes are told apart, and their tokens add up."""
    told = {key: tokens for key, (tokens, _) in plain(0.0, max_tokens=60).items()}
    rng, passes = random.Random(2), []

    def scripted(self, seq):
        if not SEEN(self, seq):
            return []
        after = told[seq.request.id, 0][seq.num_output :]
        return [[(token ^ (rng.random() > 0.8), 0.8)] for token in after[: len(self.tail)]]

    monkeypatch.setattr(MaskDrafter, "guesses_of", scripted)
    d = driver(f"idlm:model={folder},layout=chain", max_model_len=128, num_pages=512)
    real = MaskDrafter.observe

    def observe(self, seq, tree, path):
        passes.append((len(tree), len(path)))
        real(self, seq, tree, path)

    monkeypatch.setattr(MaskDrafter, "observe", observe)
    d.run(requests(d, 0.0, max_tokens=60, logprobs=None))
    assert {key: out.tokens for key, out in d.outputs.items()} == told
    stats = d.engine.stats()
    depths = stats.accepted_by_depth
    d.close()
    assert sum(path for _, path in passes) == stats.accepted_tokens
    assert sum(map(len, told.values())) == stats.accepted_tokens + stats.forwards
    whole = [(size, path) for size, path in passes if size in (0, 3)]  # near the end drafts are shorter
    cold = sum(not size for size, _ in whole)
    rejected = sum(size and path < size for size, path in whole)
    assert 0 < cold <= rejected < len(whole), "after a rejection, and only then, a pass is cold"
    chance, rates = 1.0, []
    for tried, accepted in depths:
        chance *= accepted / tried
        rates.append(chance)
    tokens = (1 + sum(rates) + 1 - rates[-1]) / (2 - rates[-1])
    measured = sum(path + 1 for _, path in whole) / len(whole)
    assert abs(measured / tokens - 1) < 0.05, (measured, tokens)


SEEN = SelfDrafter.guesses_of


# ------------------------------------------------------------------------------------------------------ a whole model


@pytest.fixture(scope="module")
def converted(tmp_path_factory, expected):
    """The smallest model with the token that it draws most often for a mask, and that token."""
    tokens = [token for out, _ in expected[0.0].values() for token in out]
    mask = max(set(tokens), key=tokens.count)
    path = shutil.copytree(resolve("nano"), tmp_path_factory.mktemp("whole") / "m")
    (path / "kvasir.json").write_text(json.dumps({"kind": "idlm", "mask_token_id": mask, "stride": 3}))
    return path, mask


@pytest.mark.parametrize("exact", [True, False])
def test_the_mask_is_never_drawn(exact, converted, expected):
    """No mask is drawn, with a drafter or without, also where steps are taped. Mutation: no sidecar."""
    path, mask = converted
    found = []
    for drafter in ("", "idlm:stride=3"):
        d = driver(drafter, model=str(path), batch_invariant=exact, served_model_name="nano")
        d.run(requests(d, 0.0, allowed_token_ids=None, logit_bias={mask: 50.0} if drafter else {}))
        tokens = [token for out in d.outputs.values() for token in out.tokens]
        assert mask not in tokens and len(tokens) == 40 and not d.errors
        found.append({key: out.tokens for key, out in d.outputs.items()})
        assert not drafter or d.engine.stats().drafted_tokens > 10
        d.close()
    assert found[0] == found[1]
    assert any(mask in out for out, _ in expected[0.0].values())


def test_a_model_that_was_not_trained_for_it_is_refused(converted):
    with pytest.raises(ConfigError, match="idlm:model=FOLDER"):
        driver("idlm")
    with pytest.raises(ConfigError, match="stride=4 is more than this model was trained for. Use stride=3"):
        driver("idlm:stride=4", model=str(converted[0]))


# ---------------------------------------------------------------------------------------------------------- refusals


def changed(change) -> dict[str, torch.Tensor]:
    tensors = tensors_of(export.load(resolve("nano")), 4)
    change(tensors)
    return tensors


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
BROKEN = {
    "holds NaN": lambda t: t["mask_embedding"].fill_(float("nan")),
    "has no 'mask_embedding'": lambda t: t.pop("mask_embedding"),
    "mask_embedding has shape": lambda t: t.update(mask_embedding=torch.zeros(7)),
    "is no half of a pair of rank 4": lambda t: t.update({Q.format("A"): torch.zeros(3, 192)}),
    "changes a matrix of": lambda t: t.update({Q.format("A"): torch.zeros(4, 100)}),
    "has no 'model.layers.0.other'": lambda t: t.update(
        {f"base_model.model.model.layers.0.other.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"}
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_refused(message, tmp_path):
    path = random_masks(tmp_path / "m", tensors=changed(BROKEN[message]))
    with pytest.raises(ConfigError, match=message) as error:
        driver(f"idlm:model={path}")
    assert "kvasir train drafter idlm" in str(error.value) or "for another base model (nano)" in str(error.value)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"kind": "ppd"}, "kind 'ppd'"),
        ({"stride": 1}, "stride is 1"),
        ({"rank": 0}, "rank is 0"),
        ({"alpha": -1}, "alpha is -1"),
        ({"target": None}, "for which model"),
        ({"stride": 3}, "stride=4 is more than .* was trained for. Use stride=3"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(config, message, tmp_path):
    path = random_masks(tmp_path / "m", **config)
    with pytest.raises(ConfigError, match=message):
        driver(f"idlm:model={path}")


def test_options_that_do_not_fit_are_refused(folder):
    with pytest.raises(ConfigError, match="layout=chain"):
        driver(f"idlm:model={folder},max_accept=true,layout=tree")
    with pytest.raises(ConfigError, match="batch-invariant"):
        driver(f"idlm:model={folder},max_accept=true")
    with pytest.raises(ConfigError, match="stride=1"):
        driver(f"idlm:model={folder},stride=1")


def test_other_weights_are_a_warning(tmp_path, caplog):
    model = export.load(resolve("nano")).model
    size, dim = model.embed_tokens.weight.shape
    target = {"name": "old", "hidden_size": dim, "vocab_size": size, "num_layers": 4, "weights": "other"}
    caplog.set_level("WARNING", "kvasir")
    driver(f"idlm:model={random_masks(tmp_path / 'm', target=target)}").close()
    assert "trained for other weights ('old')" in caplog.text
