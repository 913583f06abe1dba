"""Mistakes that look right. The identity test must notice each of them; otherwise it could not fail."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.decoding import rows, walk
from kvasir.engine.drafts.drafting import Drafting
from kvasir.engine.ways import batch
from kvasir.kv.pool import KVPool
from tests.speculation.helpers import WithGuests, driver, install, outputs, plain, requests

REAL_WALK = walk.walk


def one_too_many(span, held, sample, logit_rows, tokens):
    """Go on to the first child although another token was drawn."""
    path = REAL_WALK(span, held, sample, logit_rows, tokens)
    below = [i for i in sample if len(sample) > 1 and (span.parents[i] if span.parents else i - 1) == path[-1]]
    return path + below[:1]


def first_child(span, held, sample, logit_rows, tokens):
    """Accept any draft, whatever was drawn: emit the draws along the leftmost path."""
    return list(sample)[:2] if len(sample) > 1 else [sample[0]]


def every_row_before(parents, bits):
    for i in range(len(parents)):
        bits[i, :] = np.int64((1 << (i + 1)) - 1)


def guests_are_seen(parents, bits):
    """Let every row of a span see all others."""
    REAL_ANCESTORS(parents, bits)
    bits[:, (len(parents) - 1) // 64] |= np.int64(1) << np.int64((len(parents) - 1) % 64)


REAL_ANCESTORS = batch.tree_ancestors
MUTATIONS = {
    "one token too many": (walk, "walk", one_too_many),
    "the draft is not compared": (walk, "walk", first_child),
    "noise by slot, not by depth": (rows, "_depths", lambda parents: list(range(len(parents)))),
    "rope by slot": (batch, "tree_positions", lambda span: np.arange(span.start, span.start + span.length)),
    "siblings see each other": (batch, "tree_ancestors", every_row_before),
    "guests are seen": (batch, "tree_ancestors", guests_are_seen),
    "slots are not moved": (KVPool, "move_slots", lambda self, group, sources, targets: None),
    "slots are moved one by one, backwards": (KVPool, "move_slots", None),
}


def backwards(self, group, sources, targets):
    for source, target in reversed(list(zip(sources, targets))):
        REAL_MOVE(self, group, [source], [target])


def a_step_late(self):
    """Move what the step before has noted."""
    self.before, self._moves = self._moves, getattr(self, "before", {})
    REAL_MOVE_NOTED(self)


REAL_MOVE = KVPool.move_slots
REAL_MOVE_NOTED = Drafting._move_noted
MUTATIONS["slots are moved a step late"] = (Drafting, "_move_noted", a_step_late)
MUTATIONS["slots are moved one by one, backwards"] = (KVPool, "move_slots", backwards)


@pytest.fixture(scope="module")
def expected():
    return plain(1.0)


def run(expected) -> dict:
    d = driver("replay", check=False)
    install(
        d,
        WithGuests(
            {key: tokens for key, (tokens, _) in expected.items()}, d.engine.runner.model.spec.hidden_size, seed=3
        ),
    )
    try:
        for request in requests(d, 1.0):
            d.submit(request)
        for _ in range(200):
            if not d.engine.has_work():
                break
            d.step()
        return outputs(d)
    finally:
        d.close()


def test_unchanged_it_passes(expected):
    assert run(expected) == expected


def test_the_slots_of_a_step_are_moved_at_once(expected, monkeypatch):
    """One call moves those of all sequences, however many accepted paths leave the leftmost one."""
    counts, noted = [], []
    real = Drafting._move

    def note(self, span, rows):
        noted.append(span.seq)
        real(self, span, rows)

    def move(self, group, sources, targets):
        counts.append(len(noted))
        noted.clear()
        REAL_MOVE(self, group, sources, targets)

    monkeypatch.setattr(Drafting, "_move", note)
    monkeypatch.setattr(KVPool, "move_slots", move)
    assert run(expected) == expected
    assert max(counts) > 1 and not noted


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fails(name, expected, monkeypatch):
    owner, attribute, mutant = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    try:
        found = run(expected)
    except AssertionError:  # of the engine's own: as good
        return
    assert found != expected, f"'{name}' changes nothing that the test sees"
