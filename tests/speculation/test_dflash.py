"""DFlash's blocks are those of a plain reference, read the right states, and change no token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kvasir.engine.drafts import drafting
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask
from kvasir.speculation.drafters.dflash import Config, DFlash
from kvasir_lab.drafters.training import load_target
from tests.pairwise import label, pairwise
from tests.speculation.blocks import CONFIG, draw, fill
from tests.speculation.published import write
from tests.speculation.test_published import DIM, VOCAB, Served, sequence, texts_of
from tests.speculation.trained import driver, plain, requests, tokens


def attached(folder, model, **options) -> DFlash:
    drafter = DFlash(Config(**{"model": str(folder), "width": 1} | options))
    drafter.attach(model)
    return drafter


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 7]], ids=str)
@torch.no_grad()
def test_a_block_is_that_of_the_plain_reference(pieces, tmp_path):
    """Whatever the pieces of the text, and however deep the draft: a block is always a whole one."""
    tensors, model = draw(CONFIG), Served()
    drafter = attached(write(tmp_path, CONFIG, tensors), model)
    assert drafter.hidden_layers == (1, 3, 5)
    ids = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(7)).tolist()
    taps = torch.randn(11, 3, DIM, generator=torch.Generator().manual_seed(8))
    seq, at = sequence(ids), 0
    for size in pieces:
        drafter.ingest(seq, taps[at : at + size], at)
        at += size
    logits = fill(tensors, CONFIG, taps, torch.tensor(ids[-1:]), torch.tensor([11]), model.table, model.output)[0]
    for depth in (5, 2):
        (tree,) = drafter.propose([Ask(seq, depth, depth)])
        assert tree.tokens == logits.argmax(-1).tolist()[:depth] and tree.is_chain
        assert tree.est == pytest.approx([float(row.softmax(-1).max()) for row in logits[:depth]], rel=1e-4)


@torch.no_grad()
def test_a_tree_holds_the_largest_products(tmp_path):
    tensors, model = draw(CONFIG), Served()
    drafter = attached(write(tmp_path, CONFIG, tensors), model, width=3)
    ids, taps = [3, 1, 4, 1, 5, 9], torch.randn(5, 3, DIM, generator=torch.Generator().manual_seed(9))
    seq = sequence(ids)
    drafter.ingest(seq, taps, 0)
    (tree,) = drafter.propose([Ask(seq, 9, 2)])
    rows = fill(tensors, CONFIG, taps, torch.tensor([9]), torch.tensor([5]), model.table, model.output)[0].softmax(-1)
    best = [rows[d].topk(3) for d in range(2)]
    products = sorted([*best[0].values.tolist(), *(best[0].values[:, None] * best[1].values).flatten().tolist()])[::-1]
    joint = [e if p < 0 else e * tree.est[p] for e, p in zip(tree.est, tree.parents)]
    assert sorted(joint)[::-1] == pytest.approx(products[:9], rel=1e-4)


# ---------------------------------------------------------------------------------------------- acceptance, identity


@pytest.fixture(scope="module")
def greedy():
    return plain(0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, greedy):
    """A drafter that has learnt nano's greedy replies by heart through the plain reference, on the lab's states."""
    target = load_target("nano", "cpu")[0]
    embed = target.model.model.embed_tokens.weight.detach()
    config = CONFIG | dict(
        hidden_size=embed.shape[1], vocab_size=len(embed), head_dim=16, num_hidden_layers=2, block_size=4,
        intermediate_size=96, dflash_config=dict(mask_token_id=5, target_layer_ids=[0, 1, 2]),
    )  # fmt: skip
    tensors, data = draw(config, seed=1), []
    for text in texts_of(greedy):
        taps = target.features(torch.tensor([text]), (0, 1, 2))[0][0]
        data.append((taps, torch.tensor(text)))
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(tensors.values(), lr=4e-3)
    for _ in range(30):
        loss = torch.zeros(())
        for taps, text in data:
            places = torch.arange(len(text) - 17, len(text) - 3)  # anchors in the reply
            logits = fill(tensors, config, taps, text[places], places, embed, embed)
            wanted = text[places[:, None] + torch.arange(1, 4)]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return write(tmp_path_factory.mktemp("dflash") / "head", config, tensors)


def accepted(folder, greedy) -> float:
    """The share of drafted tokens that nano accepts when every proposal is verified. No token may change."""
    d = driver(f"dflash:model={folder},width=1", max_num_seqs=4)
    d.run(requests(d, 0.0))
    assert tokens(d) == greedy
    stats = d.engine.stats()
    d.close()
    return stats.accepted_tokens / stats.drafted_tokens


def test_what_it_learnt_is_accepted_and_wrong_rows_are_not(folder, greedy, monkeypatch):
    right = accepted(folder, greedy)
    assert right > 0.7, right
    with monkeypatch.context() as patch:  # states of the row behind, which a rejected draft may have left
        committed = drafting.Drafting._committed
        patch.setattr(drafting.Drafting, "_committed", lambda self, *args: torch.roll(committed(self, *args), 1, -1))
        real = drafting.Drafting.ingest
        patch.setattr(
            drafting.Drafting,
            "ingest",
            lambda self, span, hidden: real(self, span, None if hidden is None else torch.roll(hidden, 1, -1)),
        )
        assert accepted(folder, greedy) < 0.6 * right
    with monkeypatch.context() as patch:  # masks one place too far
        fills = DFlash._expand

        def late(self, given_5B, *rest):
            shifted = given_5B.clone()
            shifted[1] += 1
            return fills(self, shifted, *rest)

        patch.setattr(DFlash, "_expand", late)
        assert accepted(folder, greedy) < 0.8 * right


FACTORS = {
    "options": ["", ",width=1", ",window=64,lanes=2"],
    "temperature": [0.0, 1.0],
    "chunk": [6, 64],
    "cache": [True, False],
    "preempt_every": [0, 3],
    "n": [1, 2],
    "overlap": [True, False],
    "static": [True, False],
}


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=label)
def test_same_tokens(case, folder):
    d = driver(
        f"dflash:model={folder}{case['options']}",
        max_num_batched_tokens=case["chunk"],
        enable_prefix_caching=case["cache"],
        overlap=case["overlap"],
        static=case["static"],
    )
    d.run(requests(d, case["temperature"], case["n"]), preempt_every=case["preempt_every"])
    assert tokens(d) == plain(case["temperature"], case["n"]), case
    stats, drafter = d.engine.stats(), d.engine.proposals.drafting.drafter
    assert stats.drafts and stats.accepted_tokens and not drafter._lanes and not drafter._queue
    d.close()


def test_what_it_takes_is_known_before_the_pool_is_sized(folder):
    d = driver(f"dflash:model={folder}")
    drafter, model = d.engine.proposals.drafting.drafter, d.engine.runner.model
    held = sum(p.nbytes for p in drafter._head.parameters()) + drafter._head.table.table.nbytes
    assert drafter.device_bytes(model) == held + drafter.state_bytes() + drafter._k.nbytes + drafter._v.nbytes
    d.close()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c, t: t.pop("layers.1.self_attn.q_norm.weight"), r"layers\.1\.self_attn\.q_norm\.weight is missing"),
        (
            lambda c, t: t.update({"layers.0.attention_conv.base_kernel": torch.ones(2)}),
            "holds layers.0.attention_conv",
        ),
        (lambda c, t: c.update(dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 3, 7])), "layers 0 to 6"),
        (
            lambda c, t: c.update(dflash_config=dict(mask_token_id=97, target_layer_ids=[1, 3, 5])),
            "mask_token_id is 97",
        ),
        (lambda c, t: c.update(dflash_config=dict(target_layer_ids=[1, 3, 5])), "mask_token_id"),
        (lambda c, t: c.update(hidden_size=64), "hidden_size 64, and the served one has 32"),
        (lambda c, t: c.update(layer_types=["sliding_attention"]), "sliding_attention"),
        (lambda c, t: c.update(output_multiplier=2.0), "output_multiplier is 2.0"),
        (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "holds no drafter of DFlash"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(change, words, tmp_path):
    config, tensors = dict(CONFIG), draw(CONFIG)
    change(config, tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        attached(write(tmp_path / "head", config, tensors), Served())
    assert str(tmp_path / "head") in str(caught.value)


def test_a_drafter_without_a_folder_is_refused():
    with pytest.raises(ConfigError, match="dflash:model=FOLDER"):
        driver("dflash")
