"""Draft models whose vocabulary is not quite the served model's: ids are translated, and no token changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvasir.engine.drafts.vocabularies import Vocabulary, translation
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.models.loader import read_tensors
from tests.speculation.helpers import driver, outputs, requests

BASE = {"a": 0, "b": 1, "\u010a": 2, "c": 3}


def between(draft: Vocabulary, served: Vocabulary, draft_size: int = 8, served_size: int = 8):
    return translation(draft, draft_size, served, served_size)


# ---------------------------------------------------------------------------------------------------------- translation


def test_the_same_vocabulary_needs_no_translation():
    one = Vocabulary(BASE, {"<eos>": 4})
    assert between(one, Vocabulary(dict(BASE), {"<eos>": 4})) is None


def test_padding_and_added_tokens_are_translated():
    """Rows that only pad are nobody's, and an added token goes by its text, wherever it lies."""
    draft, served = Vocabulary(BASE, {"<eos>": 4, "<draft>": 5}), Vocabulary(BASE, {"<think>": 4, "<eos>": 6})
    found = between(draft, served, 6, 9)
    assert found.served_of.tolist() == [0, 1, 2, 3, 6, -1]
    assert found.to_draft([0, 4, 6, 3]) == [0, 2, 4, 3], "a token that the draft model lacks is a line break to it"
    assert found.to_served([1, 4, 0]) == [1, 6, 0] and found.to_served([1, 5, 0]) == [1], (
        "and one of its own ends a draft"
    )
    rows = found.weights(torch.arange(6.0)[None])
    assert rows.tolist() == [[0.0, 1.0, 2.0, 3.0, -np.inf, -np.inf, 4.0, -np.inf, -np.inf]]


@pytest.mark.parametrize("swapped", [False, True])
def test_one_may_continue_the_other(swapped):
    pair = [Vocabulary(BASE, {}), Vocabulary(BASE | {"d": 4, "e": 5}, {})]
    found = between(*(pair[::-1] if swapped else pair))
    known = found.served_of[found.served_of >= 0]
    assert known.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "other, words",
    [
        ({"a": 1, "b": 0, "\u010a": 2, "c": 3}, "2 tokens have other ids, 'a' for one: 0 in the draft model, 1"),
        ({"a": 0, "b": 1, "\u010a": 2, "x": 3}, "1 tokens, 'c' for one, are not in the vocabulary of the served"),
        ({"a": 0, "b": 1}, "2 tokens|are not in the vocabulary of the draft"),
        ({"x": 0, "y": 1}, "2 tokens, 'x' for one, are not in the vocabulary of the draft"),
    ],
)
def test_other_vocabularies_are_refused_with_the_reason(other, words):
    if set(other) < set(BASE):
        assert between(Vocabulary(BASE, {}), Vocabulary(other, {})) is not None
        return
    with pytest.raises(ValueError, match=words):
        between(Vocabulary(BASE, {}), Vocabulary(other, {}))


def test_a_unigram_vocabulary_and_a_broken_file(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["<0x0A>", -2.0]]}, "added_tokens": []}))
    assert Vocabulary.read(file) == Vocabulary({"a": 0, "<0x0A>": 1}, {}) and Vocabulary.read(file).line_break == 1
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Vocabulary.read(file)


# ------------------------------------------------------------------------------------------------------------- identity


def changed(folder: Path, rows: int, added: tuple[str, ...] = (), swap: tuple[int, int] | None = None) -> Path:
    """nano with ``rows`` more rows of its matrix, copies of likely tokens, and ``added`` tokens for the first ones."""
    source = resolve("nano")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    tensors = dict(read_tensors(source))
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([table, 1.2 * table[310 : 310 + rows]])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["vocab_size"] = len(table) + rows
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for i, text in enumerate(added):
        tokenizer["added_tokens"].append(
            dict(
                id=len(table) + i,
                content=text,
                single_word=False,
                lstrip=False,
                rstrip=False,
                normalized=False,
                special=True,
            )
        )
    if swap is not None:
        texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
        a, b = swap
        tokenizer["model"]["vocab"] |= {texts[a]: b, texts[b]: a}
        tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {
        "nano": "nano",
        "padded": str(changed(root / "padded", 64)),
        "added": str(changed(root / "added", 8, ("<one>", "<two>", "<three>", "<four>"))),
    }


def given(d, temperature: float, odd: bool) -> list:
    """Requests, some with tokens in their prompt that only the wider vocabulary has."""
    found = requests(d, temperature)
    if odd:
        found.append(d.request("odd", [310, 2048, 311, 2049, 312], seed=9, temperature=temperature, max_tokens=10))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain", "dyspec"])
@pytest.mark.parametrize(
    "served, draft", [("nano", "padded"), ("padded", "nano"), ("nano", "added"), ("added", "nano"), ("padded", "added")]
)
def test_same_tokens_in_both_directions(served, draft, tree, temperature, folders):
    """Whichever has more tokens: the tokens are the plain engine's, and most drafts are right."""
    plain = driver(model=folders[served])
    odd = served == "added"
    plain.run(given(plain, temperature, odd))
    d = driver(f"draft_model:model={folders[draft]},tree={tree}", model=folders[served], max_num_batched_tokens=32)
    d.run(given(d, temperature, odd), preempt_every=5)
    assert outputs(d) == outputs(plain)
    stats = d.engine.stats()
    assert not d.engine.proposals.drafting._failures and stats.accepted_tokens > 20
    plain.close()
    d.close()


def test_a_mapping_that_is_off_by_one_loses_its_drafts(folders):
    """Must fail: ids that are not translated at all, or to their neighbours, are seldom right. No token changes."""
    rates = []
    for shift in (0, 1):
        d = driver(f"draft_model:model={folders['added']}", model="nano")
        model = d.engine.proposals.drafting.drafter._model
        model._ids.served_of[:2047] += shift
        d.run(requests(d, 0.0))
        stats = d.engine.stats()
        rates.append(stats.accepted_tokens / stats.drafted_tokens)
        d.close()
    assert rates[0] > 0.9 and rates[1] < 0.5 * rates[0], rates


def test_what_cannot_be_translated_is_refused(tmp_path, folders):
    other = changed(tmp_path / "swapped", 0, swap=(400, 401))
    with pytest.raises(ConfigError, match="2 tokens have other ids.*--drafter suffix"):
        driver(f"draft_model:model={other}")
    with pytest.raises(ConfigError, match="Leave out max_accept"):
        driver(f"draft_model:model={folders['added']},max_accept=true", batch_invariant=False)
    bare = changed(tmp_path / "bare", 64)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"without a tokenizer\.json of both"):
        driver(f"draft_model:model={bare}")
