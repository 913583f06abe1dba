"""Every drafter of chains with a model that keeps states: what it drafts, and what a script drafts in its place, leave
no trace in the tokens. Drafters that do not fit are refused.

A script lets none, the first or all of a chain be right, while the drafter itself still proposes, hears what was
accepted and moves on. CPU exact mode.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask
from kvasir.speculation.tree import DraftTree
from kvasir_lab import export
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.engine.driver import Driver
from tests.engine.test_states import without_the_walk
from tests.lab.test_hybrid import lively
from tests.speculation.trained import random_head

OUTPUT = 16
SHARED = [300 + (7 * i) % 1200 for i in range(60)]
PROMPTS = [[*SHARED[:length], 400 + k, 401 + k] for k, length in enumerate((5, 20, 41))]
HEADS = "medusa", "eagle"
DRAFTERS = (
    "ngram:min_match=1",
    "suffix:min_match=1",
    "token_recycling",
    "draft_model:model=embedded",
    "replay:accept=0.7",
    *HEADS,
    *(LATER := ("draft_model:model=embedded,tree=dyspec,max_depth=5", "ngram:min_match=1+suffix")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A hybrid of the lab with random weights: layers 0, 1 and 3 keep states."""
    path = tmp_path_factory.mktemp("hybrid")
    export.export(lively(), shipped_tokenizer(), path)
    return str(path)


@pytest.fixture(scope="module")
def heads(folder, tmp_path_factory) -> dict[str, str]:
    """Specs of drafters with random weights."""
    root = tmp_path_factory.mktemp("heads")
    return {kind: f"{kind}:model={random_head(kind, root / kind, folder)}" for kind in HEADS}


def engine(folder: str, drafter: str = "", **options) -> Driver:
    given = dict(page_slots=8, max_num_seqs=4, max_model_len=112, num_pages=96, state_interval=16)
    return Driver(folder, drafter=drafter, draft_control="fixed", **{**given, **options})


def requests(driver: Driver, **params) -> list:
    """Every other request is confined to four tokens, so that its text repeats itself."""
    few = [{}, {"allowed_token_ids": [310, 311, 312, 313]}]
    given = dict(temperature=0.7, max_tokens=OUTPUT, ignore_eos=True) | params
    return [driver.request(f"r{k}", p, seed=k, **given, **few[k % 2]) for k, p in enumerate(PROMPTS)]


def tokens(driver: Driver) -> dict:
    assert not driver.errors
    return {key: out.tokens for key, out in driver.outputs.items()}


@pytest.fixture(scope="module")
def alone(folder) -> dict:
    driver = engine(folder, max_num_batched_tokens=256, enable_prefix_caching=False, overlap=False)
    for request in requests(driver):
        driver.run([request])
    driver.close()
    return tokens(driver)


def scripted(real: Callable, outputs: dict, right: int) -> Callable:
    """The drafter's ``propose``, whose trees give way to chains of which ``right`` tokens are right."""

    def chain(ask: Ask) -> DraftTree:
        told, tree, node = outputs[ask.seq.request.id, ask.seq.branch], DraftTree(), -1
        for i, token in enumerate(told[ask.seq.num_output :][: min(ask.max_depth, ask.max_nodes, 6)]):
            node = tree.add(node, token if i < right else token ^ 1, 0.9)
        return tree

    def propose(asks: list[Ask]) -> list[DraftTree]:
        assert len(real(asks)) == len(asks)
        return [chain(ask) for ask in asks]

    return propose


# How many drafted tokens are right (None: the drafter's own are drafted). Each drafter has its own drafts and one of
# the others, in turn. `make test-all` runs all, and the drafters of LATER.
RIGHT = {"its own": None, "none right": 0, "one right": 1, "all right": 99}


def slow(i: int, drafter: str, place: int) -> list:
    return [pytest.mark.slow] * (drafter in LATER or place not in (0, 1 + i % 3))


CASES = [
    pytest.param(drafter, right, id=f"{drafter}-{name}", marks=slow(i, drafter, place))
    for i, drafter in enumerate(DRAFTERS)
    for place, (name, right) in enumerate(RIGHT.items())
]


@pytest.mark.parametrize("drafter, right", CASES)
def test_drafts_leave_no_trace(drafter, right, folder, heads, alone):
    driver = engine(folder, heads.get(drafter, drafter), max_num_batched_tokens=40)
    drafting = driver.engine.proposals.drafting
    drafting.controller._rest = 0  # from the first step on
    if drafter.startswith("replay"):
        drafting.drafter.load({tuple(PROMPTS[int(name[1:])]): found for (name, _), found in alone.items()}, 1)
    if right is not None:
        drafting.drafter.propose = scripted(drafting.drafter.propose, alone, right)
    driver.run(requests(driver), preempt_every=7)
    stats = driver.engine.stats()
    assert tokens(driver) == alone and not drafting._failures
    assert stats.drafted_tokens > 0
    if right is not None:
        assert (stats.accepted_tokens > 0) == (right > 0)
    driver.close()


def test_a_row_too_many_is_seen(folder, alone, monkeypatch):
    """The control of the test above: one draft more than the walk accepted is folded."""
    driver = engine(folder, "ngram:min_match=1", max_num_batched_tokens=40)
    driver.engine.proposals.drafting.controller._rest = 0
    driver.engine.proposals.drafting.drafter.propose = scripted(
        driver.engine.proposals.drafting.drafter.propose, alone, 1
    )
    without_the_walk(monkeypatch)
    try:
        driver.run(requests(driver))
        found = tokens(driver)
    except AssertionError as e:
        assert "internal" in str(e)
        return
    assert found != alone


@pytest.mark.parametrize(
    "drafter, message",
    [("ppd", "adds rows of its own"), ("layer_skip:exits=1+2", "recurrent layers")],
)
def test_drafters_that_do_not_fit_are_refused(drafter, message, folder, tmp_path):
    if drafter == "ppd":
        drafter = f"ppd:model={random_head('ppd', tmp_path / 'ppd', folder)}"
    with pytest.raises(ConfigError, match=message):
        engine(folder, drafter)


def test_a_draft_model_with_states_is_refused(folder):
    with pytest.raises(ConfigError, match="cannot take back what was drafted"):
        engine("nano", f"draft_model:model={folder}")
