"""I-DLM's two halves: masks compute what an engine's rows compute, clean rows are plain rows, and losses are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kvasir.technique import load
from kvasir_lab.drafters import mask_rows, prompt_rows
from kvasir_lab.drafters.data import Batch, Texts, batches
from kvasir_lab.drafters.gated_adapter import GatedAdapter
from kvasir_lab.drafters.kind import DRAFTERS, MODELS, Kind
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model, Shape
from kvasir_lab.trained_models.idlm import CLEAN, MASK

SHAPE = Shape(dim=32, layers=3, ffn=48, heads=2, kv_heads=1, head_dim=16, positions=160)
CLOSE = 2e-3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Model:
    found = Model(SHAPE, 1)
    with torch.no_grad():
        found.model.embed_tokens.weight.mul_(12)
        for p in found.model.layers.parameters():
            p.mul_(4)  # layers that change what they read, so that a wrong mask shows
    return found.requires_grad_(False)


@pytest.fixture(scope="module")
def adapter(model) -> GatedAdapter:
    """Random and not zero: with B = 0 every test of the gate would pass."""
    found = GatedAdapter(model, 4, 8.0, seed=2)
    with torch.no_grad():
        for i, b in enumerate(found.b):
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return found.requires_grad_(False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths, begins = torch.tensor([17, 11, 14]), torch.tensor([4, 7, 1])
    ids = torch.zeros(3, 17, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        ids[row, :length] = torch.from_numpy(rng.integers(10, 2000, length))
    return Batch(ids, lengths, begins, np.arange(3))


class Gate:
    """The adapter as hooks on the model's own matrices, for the rows in ``rows`` alone."""

    def __init__(self, model: Model, adapter: GatedAdapter) -> None:
        self.rows: torch.Tensor | None = None
        self.handles = [
            layer.get_submodule(part).register_forward_hook(self.hook(adapter, 7 * i + j))
            for i, layer in enumerate(model.model.layers)
            for j, part in enumerate(
                [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
            )
        ]

    def hook(self, adapter: GatedAdapter, i: int):
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            change = inputs[0] @ adapter.a[i].t() @ adapter.b[i].t() * (adapter.alpha / adapter.rank)
            return output + self.rows.float()[:, None] * change

        return add

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def states(model: Model, x: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor | None) -> torch.Tensor:
    """The final norm's output of rows with inputs x [T, E]."""
    rope = tuple(part[0, 0][positions][None, None] for part in model.rope(SHAPE.positions))
    x = x[None]
    for layer in model.model.layers:
        x = layer(x, rope, None if sees is None else sees[None, None])
    return model.model.norm(x)[0]


def engine_rows(model: Model, adapter: GatedAdapter, ids: torch.Tensor, root: int, count: int) -> torch.Tensor:
    """Mask rows behind row ``root`` as an engine computes them: plain causal rows, the adapter on masks alone."""
    gate = Gate(model, adapter)
    gate.rows = torch.arange(root + 1 + count) > root
    x = torch.cat([model.model.embed_tokens(ids[: root + 1]), adapter.mask_E.expand(count, -1)])
    found = states(model, x, torch.arange(len(x)), None)[root + 1 :]
    gate.close()
    return found


def two_halves(model, adapter, ids, begin, masks, offset, rule="right", gated=True) -> torch.Tensor:
    """The published construction, dense: 2 L rows, noisy then clean, with the rule of §1.2 or a planted mistake."""
    n = len(ids)
    noisy = torch.arange(n) >= begin
    embedded = model.model.embed_tokens(ids)
    x = torch.cat([torch.where(noisy[:, None], adapter.mask_E, embedded), embedded])
    at = torch.arange(n)
    block, causal = (at + offset) // masks, at[:, None] >= at
    own, earlier = block[:, None] == block, block[:, None] > block
    none = torch.zeros(n, n, dtype=torch.bool)
    sees = {
        "right": torch.cat([torch.cat([own & causal, earlier], 1), torch.cat([none, causal], 1)]),
        "one causal mask over both halves": torch.ones(2 * n, 2 * n, dtype=torch.bool).tril(),
        "a block sees its own clean tokens": torch.cat(
            [torch.cat([own & causal, earlier | (own & causal)], 1), torch.cat([none, causal], 1)]
        ),
    }[rule]
    gate = Gate(model, adapter)
    gate.rows = torch.cat([noisy, torch.zeros(n, dtype=torch.bool)]) if gated else torch.ones(2 * n, dtype=torch.bool)
    found = states(model, x, torch.cat([at, at]), sees)
    gate.close()
    return found


def trained_rows(model, adapter, batch, masks, offsets):
    rows = mask_rows.layout(batch, masks, offsets, torch.device("cpu"))
    text = prompt_rows.read(model, batch.ids)[1]
    return rows, mask_rows.run(model, adapter.mask_E, rows, text, adapter.product)


def largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("masks", [1, 3])
@torch.no_grad()
def test_masks_compute_what_rows_of_an_engine_do(masks, model, adapter, batch):
    """Every mask of every block, blocks cut short by the prompt and by the end included; then planted mistakes."""
    rules = ("one causal mask over both halves", "a block sees its own clean tokens", "the gate is open everywhere")
    wrong = dict.fromkeys(rules, 0.0)
    seen = 0
    for shift in range(masks):
        offsets = torch.tensor([shift, (shift + 1) % masks, (shift + 2) % masks])
        rows, found = trained_rows(model, adapter, batch, masks, offsets)
        for i, (length, begin) in enumerate(zip(batch.lengths.tolist(), batch.begins.tolist())):
            ids = batch.ids[i, :length]
            halves = {"right": two_halves(model, adapter, ids, begin, masks, int(offsets[i]))}
            for rule in rules[:2]:
                halves[rule] = two_halves(model, adapter, ids, begin, masks, int(offsets[i]), rule)
            halves[rules[2]] = two_halves(model, adapter, ids, begin, masks, int(offsets[i]), gated=False)
            plain = states(model, model.model.embed_tokens(ids), torch.arange(length), None)
            assert largest(halves["right"][length:], plain) < 1e-4, "clean rows are rows of the plain model"
            assert largest(halves[rules[0]][length:], plain) > CLOSE
            for r in rows.used[i].nonzero()[:, 0].tolist():
                place, depth = int(rows.place[i, r]), int(rows.depth[i, r])
                wanted = engine_rows(model, adapter, ids, place - 1 - depth, depth + 1)[-1]
                assert largest(found[i, r], wanted) < CLOSE
                assert largest(halves["right"][place], wanted) < CLOSE
                for rule in rules:
                    wrong[rule] = max(wrong[rule], largest(halves[rule][place], wanted))
                seen += 1
    assert seen == masks * int((batch.lengths - 1 - batch.begins).sum())
    if masks == 1:  # a block of one mask has no own clean token before it but that of its own position
        assert wrong[rules[1]] > 50 * CLOSE
    assert all(error > 10 * CLOSE for error in wrong.values()), wrong


@torch.no_grad()
def test_a_layout_with_a_mistake_is_found(model, adapter, batch, monkeypatch):
    """Negative controls of the comparison above: the trainer's own layout, made wrong in three ways."""
    offsets, real = torch.tensor([0, 1, 2]), mask_rows.layout

    def own_clean(*args):
        rows = real(*args)
        tokens = torch.arange(batch.ids.shape[1])
        return mask_rows.Layout(
            rows.place,
            rows.depth,
            rows.used,
            torch.cat(
                [
                    rows.sees[..., : len(tokens)] | (tokens <= rows.place[..., None])[:, None],
                    rows.sees[..., len(tokens) :],
                ],
                -1,
            ),
        )

    def all_masks(*args):
        rows = real(*args)
        size = batch.ids.shape[1]
        causal = torch.ones_like(rows.sees[..., size:]).tril()
        return mask_rows.Layout(rows.place, rows.depth, rows.used, torch.cat([rows.sees[..., :size], causal], -1))

    def shifted(*args):
        rows = real(*args)
        return mask_rows.Layout(rows.place + 1, rows.depth, rows.used, rows.sees)

    def error() -> float:
        rows, found = trained_rows(model, adapter, batch, 3, offsets)
        right = real(batch, 3, offsets, torch.device("cpu"))
        errors = [0.0]
        for i, r in right.used.nonzero().tolist():
            place, depth = int(right.place[i, r]), int(right.depth[i, r])
            errors.append(
                largest(found[i, r], engine_rows(model, adapter, batch.ids[i], place - 1 - depth, depth + 1)[-1])
            )
        return max(errors)

    assert error() < CLOSE
    for wrong in (own_clean, all_masks, shifted):
        monkeypatch.setattr(mask_rows, "layout", wrong)
        assert error() > 10 * CLOSE, wrong.__name__


def texts_of(batch: Batch) -> Texts:
    parts = [row[:length].numpy() for row, length in zip(batch.ids, batch.lengths.tolist())]
    return Texts(
        np.concatenate(parts).astype(np.int32),
        np.cumsum([0, *map(len, parts)]),
        batch.begins.numpy(),
        np.array([0, 0, 0]),
        ("a",),
    )


def begun(package: str, spec: str, model: Model) -> Kind:
    kind = load(package, spec, Kind)
    kind.begin(Target(model, "tiny"), 0)
    return kind


@pytest.mark.parametrize("objective", ["kl", "ce", "tv"])
@torch.no_grad()
def test_the_adapters_losses_are_those_of_each_row_alone(objective, model, adapter, batch):
    kind = begun(DRAFTERS, f"idlm:objective={objective},block_offset=aligned,rank=4", model)
    kind.module.load_state_dict(adapter.state_dict())
    total, means = kind.losses(batch, 0, 0.9)
    wanted: list[list[float]] = [[], [], []]
    for i, (length, begin) in enumerate(zip(batch.lengths.tolist(), batch.begins.tolist())):
        ids = batch.ids[i, :length]
        clean = model(ids[None])[0].log_softmax(-1)
        for place in range(begin, length - 1):
            first = max(place // 3 * 3, begin)
            rows = engine_rows(model, adapter, ids, first - 1, place - first + 1)
            log_q = (rows[-1] @ model.model.embed_tokens.weight.t()).log_softmax(-1)
            p, q = clean[place].exp(), log_q.exp()
            wanted[place - first].append(
                {
                    "ce": float(-log_q[ids[place + 1]]),
                    "kl": float(F.kl_div(log_q, clean[place], log_target=True, reduction="sum")),
                    "tv": float(1 - torch.minimum(p, q).sum()),
                }[objective]
            )
    torch.testing.assert_close(means, torch.tensor([np.mean(x) for x in wanted]).float(), rtol=1e-3, atol=1e-4)
    answers = int((batch.lengths - batch.begins).sum())
    assert float(total) == pytest.approx(sum(map(sum, wanted)) / answers, rel=1e-3)
    # The first third of a run has stride 2: one mask a block, and nothing deeper.
    assert (kind.losses(batch, 0, 0.3)[1][1:] == 0).all() and kind.losses(batch, 0, 0.34)[1].all()


def test_blocks_begin_anywhere_unless_aligned(model, batch):
    free, fixed = (begun(DRAFTERS, f"idlm:block_offset={x}", model) for x in ("random", "aligned"))
    drawn = torch.stack([free.offsets(batch, step, 3) for step in range(40)])
    assert set(drawn.flatten().tolist()) == {0, 1, 2} and not fixed.offsets(batch, 3, 3).any()
    assert torch.equal(free.offsets(batch, 7, 3), drawn[7]), "a resumed run draws the same"


@pytest.mark.parametrize("stride", [2, 4])
def test_a_converted_models_loss_and_gradients_are_those_of_the_published_halves(stride, model, batch):
    """The dense construction has noisy prompt rows, too: leaving them out changes neither loss nor gradient."""
    kind = begun(MODELS, f"idlm:stride={stride},block_offset=aligned", model)
    total, shown = kind.losses(batch, 0, 0.9)
    total.backward()
    other = begun(MODELS, f"idlm:stride={stride}", model).module
    zero, head = GatedAdapter(other, 1, 1.0), other.model.embed_tokens.weight
    del zero.mask_E
    zero.mask_E = head[MASK]
    banned = torch.zeros(len(head)).index_fill(0, torch.tensor([MASK]), -1e4)
    masked, clean, answers = [], [], 0
    for ids, length, begin in zip(batch.ids, batch.lengths.tolist(), batch.begins.tolist()):
        ids = ids[:length]
        found = two_halves(other, zero, ids, begin, stride - 1, 0)
        log_p = (found @ head.t() + banned).log_softmax(-1)
        loss = -log_p.view(2, length, -1)[:, :-1].gather(-1, ids[1:].expand(2, -1)[..., None])[..., 0]
        masked.append(loss[0, begin:])
        clean.append(loss[1, begin - 1 :])
        answers += length - begin
    l_mask, l_clean = torch.cat(masked).sum() / answers, torch.cat(clean).mean()
    weight = CLEAN if stride < 4 else (l_mask / l_clean).item()
    wanted = l_mask + weight * l_clean
    wanted.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert shown[-1].item() == pytest.approx(l_clean.item(), rel=1e-4)
    for (name, mine), theirs in zip(kind.module.named_parameters(), other.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-4, msg=name)


@torch.no_grad()
def test_a_converted_model_never_draws_its_mask(model, batch):
    kind = begun(MODELS, "idlm", model)
    kind.module.model.embed_tokens.weight[MASK] *= 50
    assert float(kind.log_probs(kind.text(batch.ids)[0])[..., MASK].exp().max()) == 0


@torch.no_grad()
def test_what_is_measured_is_what_rows_of_an_engine_would_draft(model, adapter, batch):
    """Guesses behind every root, the chance that a sampled draft is accepted, and the sums of the two layouts."""
    kind = begun(DRAFTERS, "idlm:rank=4", model)
    kind.module.load_state_dict(adapter.state_dict())
    tokens, ratio, overlap = kind.probe(batch)
    for i, (length, begin) in enumerate(zip(batch.lengths.tolist(), batch.begins.tolist())):
        ids = batch.ids[i, :length]
        clean = model(ids[None])[0].softmax(-1)
        for root in range(begin - 1, length - 2):
            q = (engine_rows(model, adapter, ids, root, 3) @ model.model.embed_tokens.weight.t()).softmax(-1)
            for j in range(min(3, length - 2 - root)):
                p = clean[root + 1 + j]
                assert tokens[j, i, root] == q[j].argmax()
                assert float(overlap[j, i, root]) == pytest.approx(float(torch.minimum(p, q[j]).sum()), rel=1e-2)
                assert float(ratio[j, i, root]) == pytest.approx(float((p * (p / q[j]).clamp(max=1)).sum()), rel=1e-2)
    found = kind.measure(texts_of(batch))
    assert found["tokens"] == int((batch.lengths - 1 - batch.begins).sum())
    assert found["chain"]["forwards"] >= found["forwards"] and sum(found["chain"]["shares"].values()) == pytest.approx(
        1
    )
    assert 0 < found["alpha_introspective"] <= 1


def test_batches_of_one_token_replies_have_no_masks(model):
    """A reply of one token is drawn by the prompt's last row; there is nothing to train on, and no NaN."""
    texts = Texts(np.array([5, 6, 7, 5, 6], np.int32), np.array([0, 3, 5]), np.array([2, 1]), np.array([0, 0]), ("a",))
    kind = begun(DRAFTERS, "idlm", model)
    total, means = kind.losses(next(batches(texts, 256, 0, 0)), 0, 0.9)
    assert total.item() == 0 and not means.any()
