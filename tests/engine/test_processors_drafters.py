"""Processors with every drafter: the tokens of plain decoding at T = 0 and 1, and the same distribution."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from kvasir.decoding import steering
from kvasir.models.checkpoint import read_config, resolve
from kvasir.technique import own
from tests.engine.driver import Driver
from tests.engine.test_processors import BUDGET, KINDS, TIP, WAVE, fleet, outcome, plain, processor  # noqa: F401
from tests.speculation.blocks import random_block
from tests.speculation.trained import random_head

DRAFTERS = {
    "ngram": "ngram:min_match=1",
    "suffix": "suffix:min_match=1",
    "token_recycling": "token_recycling",
    "draft_model": "draft_model:model=embedded",
    "layer_skip": "layer_skip:exits=1+2",
    "replay": "replay:accept=0.7",
    "medusa": "",
    "eagle": "",
    "dflash": "",
    "ppd": "",
}
USUAL = ("ngram", "suffix", "token_recycling")
DRAWS, PROMPT = 2000, [300, 303]
WORSE = 5  # standard deviations of a chi-square that no equal distributions reach


def test_every_drafter_is_here():
    """All but I-DLM's, whose guests ignore processors and are verified all the same (``test_idlm``), and the one that
    needs a layer in the served checkpoint (``test_identity``)."""
    assert sorted({*DRAFTERS, "idlm", "mtp"}) == own("kvasir.speculation.drafters")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Random weights: their drafts are seldom right, and are verified all the same."""
    root = tmp_path_factory.mktemp("heads")
    names = [name for name, spec in DRAFTERS.items() if not spec and name != "dflash"]
    found = {name: f"{name}:model={random_head(name, root / name)}" for name in names}
    shape = read_config(resolve("nano"))
    sizes = shape["hidden_size"], shape["vocab_size"], shape["num_hidden_layers"]
    return found | {"dflash": f"dflash:model={random_block(root / 'dflash', *sizes)}"}


def drafting(name: str, heads: dict[str, str], known: dict[tuple[int, ...], list[int]], **options) -> Driver:
    """An engine with a drafter that drafts from the first step on. ``known``: outputs by prompt, for ``replay``."""
    driver = Driver(drafter=DRAFTERS[name] or heads[name], draft_control="fixed", **options)
    if name == "replay":
        driver.engine.proposals.drafting.drafter.load(known, 1)
    if name == "layer_skip":  # by itself it drafts nothing for so small a model
        turns = cycle([(1, 3), (2, 2)])
        driver.engine.proposals.drafting.drafter._choose = lambda seqs: next(turns)
    return driver


def known_of(plain) -> dict[tuple[int, ...], list[int]]:  # noqa: F811
    at = Driver()
    found = {tuple(r.prompt_ids): plain[r.id, 0][0] for r in fleet(at)}
    at.close()
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if spec else pytest.mark.slow)
        for name, spec in DRAFTERS.items()
        if name not in USUAL
    ],
)
def test_tokens_are_those_of_plain_decoding(name, heads, plain):  # noqa: F811
    """Sampled and greedy requests. ``USUAL`` drafters run in ``test_processors.py``."""
    driver = drafting(name, heads, known_of(plain))
    driver.run(list(fleet(driver, KINDS[:7])))
    found = outcome(driver)
    assert found == {key: plain[key] for key in found}
    stats = driver.engine.stats()
    assert stats.drafted_tokens > 0 and not driver.engine.proposals.drafting._failures
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_are_those_of_plain_decoding(name, heads, plain):  # noqa: F811
    found = []
    for driver in (Driver(), drafting(name, heads, known_of(plain))):
        driver.run(list(fleet(driver, [dict(kind, temperature=0.0) for kind in KINDS])))
        found.append(outcome(driver))
        driver.close()
    assert found[0] == found[1]


# --------------------------------------------------------------------------------------------------------- distribution


def draws(driver: Driver, specs: list[str], first: int) -> torch.Tensor:
    """[DRAWS, 3] tokens of as many requests, seeded from ``first`` on."""
    requests = []
    for i in range(DRAWS):
        seed = i + first
        r = driver.request(f"{i}", PROMPT, temperature=1.0, top_k=6, max_tokens=3, seed=seed, ignore_eos=True)
        r.processors = [processor(spec) for spec in specs]
        requests.append(r)
    driver.run(requests)
    assert not driver.errors
    found = torch.tensor([driver.outputs[f"{i}", 0].tokens for i in range(DRAWS)])
    driver.close()
    return found


def differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether a chi-square test tells two samples apart at any of the three positions."""
    for position in range(3):
        ids = torch.cat([one, two])[:, position].unique()
        a, b = (torch.stack([(c[:, position] == i).sum() for i in ids]).double() for c in (one, two))
        keep = a + b >= 20
        a, b = a[keep], b[keep]
        chi, freedom = (((a - b) ** 2) / (a + b)).sum().item(), max(1, int(keep.sum()) - 1)
        if chi > freedom + WORSE * (2 * freedom) ** 0.5 + WORSE:
            return True
    return False


ROOM = dict(max_num_seqs=64, num_pages=4096)
SETS = {"all": [WAVE, TIP, BUDGET], "short budget": ["budget:max_thinking=2,num_ignore=0"]}


@pytest.fixture(scope="module")
def sampled():
    return {name: draws(Driver(**ROOM), specs, 0) for name, specs in SETS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("specs", SETS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_draw_from_the_same_distribution(name, specs, heads, sampled):
    known = {tuple(PROMPT): sampled[specs][0].tolist()}
    driver = drafting(name, heads, known, **ROOM)
    assert not differ(sampled[specs], draws(driver, SETS[specs], 100_000))


@pytest.mark.slow
def test_the_wrong_index_of_a_row_changes_the_distribution(monkeypatch, heads, sampled):
    """Negative control: all rows of a draft have the index of the first."""
    known = {tuple(PROMPT): sampled["all"].mode(0).values.tolist()}
    right = steering.Steering.bias
    monkeypatch.setattr(
        steering.Steering, "bias", lambda self, index, path, wait: right(self, index - len(path), path, wait)
    )
    assert differ(sampled["all"], draws(drafting("replay", heads, known, **ROOM), SETS["all"], 100_000))
