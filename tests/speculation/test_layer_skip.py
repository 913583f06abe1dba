"""Early exits: their drafts, their shadow drafts, and the choice among them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import DRAFTERS, Ask, Drafter
from kvasir.speculation.drafters import layer_skip
from kvasir.speculation.drafters.layer_skip import BEGIN, OMEGA, START, Evidence
from kvasir.types import Request, SamplingParams, Sequence
from tests.speculation.helpers import driver, outputs, plain, requests


def sequence(tokens: list[int], **params) -> Sequence:
    return Sequence(
        Request(id="r", prompt_ids=tokens, params=SamplingParams(**params), seed=0, max_tokens=99, tenant="")
    )


def drafter_of(d):
    return d.engine.proposals.drafting.drafter


def fade(d, after: int, share: float) -> None:
    """Scale what the layers after ``after`` add by ``share``: with 0, that exit equals the model."""
    for block in d.engine.runner.model.blocks[after:]:
        for layer in (block.mixer.o, block.ffn.down):
            layer.weight.tensor.mul_(share)
    d.engine.weights_changed()


class Judged:
    """Record what the exits would have drafted, and what they drafted."""

    def __init__(self, d) -> None:
        self.model, self.shadows, self.drafted = drafter_of(d)._model, {}, []
        self._draw, self._judge = self.model.draw, self.model.judge
        self.model.draw, self.model.judge = self.draw, self.judge

    def draw(self, asks, after, stops):
        found = self._draw(asks, after, stops)
        self.drafted += [(ask.seq, len(ask.seq.tokens), after, *drawn) for ask, drawn in zip(asks, found)]
        return found

    def judge(self, pieces):
        found = self._judge(pieces)
        for (seq, start, hidden), by_exit in zip(pieces, found):
            for after, rows in zip(self.model.exits, by_exit):
                assert len(rows) == len(hidden)
                self.shadows |= {(seq, start + 1 + i, after): row for i, row in enumerate(rows)}
        return found


# -------------------------------------------------------------------------------------------------------- in the engine


def test_all_layers_draw_what_the_model_draws():
    """An exit after the last layer is the model itself, with the same pages and noise, so all its proposals are
    accepted."""
    d = driver("layer_skip", max_num_seqs=4)
    fade(d, 2, 0.0)
    d.run(requests(d, 1.0, max_tokens=30), preempt_every=7)
    stats = d.engine.stats()
    assert stats.accepted_tokens > 40
    drafter = drafter_of(d)
    assert drafter._all[2].share > 0.99 and drafter._all[3].share > 0.99
    d.close()


@pytest.mark.parametrize(
    "codec, params",
    [
        ("plain", dict(top_k=5, top_p=0.8)),
        ("int4_bdr", dict(temperature=0.0)),
        ("nvfp4", dict(allowed_token_ids=[310, 311, 312, 313])),
    ],
    ids=str,
)
def test_a_shadow_token_is_what_the_exit_drafts(codec, params):
    """Shadow tokens equal drafted tokens and probabilities to the bit, wherever a draft's position was judged later."""
    d = driver("layer_skip:exits=1+2+3", max_num_seqs=4, kv_codec=codec)
    turns = itertools.cycle((1, 2, 3))
    drafter_of(d)._choose = lambda seqs: (next(turns), 8)
    heard = Judged(d)
    d.run(requests(d, **{"temperature": 1.0, "max_tokens": 20} | params), preempt_every=9)
    compared = 0
    for seq, first, after, tokens, sure in heard.drafted:
        for i, drawn in enumerate(zip(tokens, sure)):
            if tokens[:i] == seq.tokens[first : first + i] and (shadow := heard.shadows.get((seq, first + i, after))):
                assert shadow[0] == drawn[0] and shadow[1] == pytest.approx(drawn[1], rel=1e-5)
                compared += 1
    assert compared > 40
    d.close()


def test_every_token_is_judged_once_for_all_exits():
    """Shadows are judged even if another drafter proposed, or none; never for prompt rows, and never twice after a
    preemption."""
    d = driver("layer_skip:exits=1+3", max_num_seqs=2)
    heard, calls = Judged(d), []
    judge = drafter_of(d)._model.judge

    def counted(pieces):
        calls.extend((seq, start + i) for seq, start, hidden in pieces for i in range(len(hidden)))
        return judge(pieces)

    drafter_of(d)._model.judge = counted
    given = requests(d, 1.0, max_tokens=20)
    d.run(given, preempt_every=5)
    assert len(calls) == len(set(calls)) and all(at >= seq.num_prompt - 1 for seq, at in calls)
    assert len(calls) > 0.8 * 20 * len(given), "the last rows of a sequence wait in vain"
    assert set(heard.shadows) == {(seq, at + 1, after) for seq, at in calls for after in (1, 3)}
    d.close()


@pytest.mark.parametrize("right, share, taken", [(1, 0.0, 1), (2, 0.0, 2), (3, 0.0, 3), (0, 1.0, 0)])
def test_the_first_exit_that_is_right_is_taken(right, share, taken):
    """The shallowest perfect exit is chosen, and none for an unchanged model.

    Layers after ``right`` add nothing, so later exits are as good and cost more. The last of them adds much, so earlier
    exits only guess."""
    d = driver("layer_skip:exits=1+2+3", max_num_seqs=2)
    if taken:
        fade(d, right - 1, 4.0)
        fade(d, right, share)
    heard = Judged(d)
    drafter_of(d)._model.head_layers = 0.05
    d.run(requests(d, 1.0, max_tokens=40, allowed_token_ids=None))
    if taken:
        assert {after for _, _, after, *_ in heard.drafted[-12:]} == {taken} and drafter_of(d)._all[taken].share > 0.97
    else:
        assert len(heard.drafted) < d.engine.stats().step / 4
    d.close()


def test_no_token_changes_whatever_is_chosen():
    """Random exits and thresholds, some of them nonsense."""
    expected = plain(1.0)
    d = driver("layer_skip:exits=1+2+3", max_num_seqs=4)
    rng, drafter = random.Random(0), drafter_of(d)
    drafter._choose = lambda seqs: (rng.randint(0, 3), rng.randint(0, 8))
    draw = drafter._model.draw
    drafter._model.draw = lambda asks, after, stops: draw(
        asks, after, [rng.choice([-1.0, 0.3, float("nan"), 2.0]) for _ in stops]
    )
    d.run(requests(d, 1.0), preempt_every=4)
    assert outputs(d) == expected and d.engine.stats().drafted_tokens > 20
    d.close()


def test_a_draft_ends_behind_the_first_unsure_token():
    d = driver("layer_skip:exits=2", max_num_seqs=4)
    drafter = drafter_of(d)
    drafter._choose = lambda seqs: (2, 8)
    heard = Judged(d)
    draw, given = drafter._model.draw, {}

    def told(asks, after, stops):
        for ask, stop in zip(asks, stops):
            given[ask.seq, len(ask.seq.tokens)] = stop, ask.max_depth
        return draw(asks, after, stops)

    drafter._model.draw = told
    d.run(requests(d, 1.0, max_tokens=20))
    lengths = set()
    for seq, first, _, tokens, sure in heard.drafted:
        stop, depth = given[seq, first]
        below = [i for i, p in enumerate(sure) if p < stop]
        assert len(tokens) == len(sure) == (below[0] + 1 if below else depth)
        lengths.add(len(tokens))
    assert len(lengths) > 2
    d.close()


@pytest.mark.parametrize("exits, complaint", [("4", "cannot exit after 4"), ("x", "numbers of layers")])
def test_an_exit_must_be_a_layer(exits, complaint):
    with pytest.raises(ConfigError, match=complaint):
        driver(f"layer_skip:exits={exits}")


# ------------------------------------------------------------------------------------------------------- the estimate


class Exits:
    """Draw ``depth`` tokens 7 with probability ``sure``. A shadow token is 7 where ``right`` says so for the exit and
    the row's position."""

    exits, num_layers, head_layers = (3, 6, 9), 12, 1.0

    def __init__(self, right, sure=lambda after, at: 0.9) -> None:
        self.right, self.sure, self.used, self.stops = right, sure, [], []

    def draw(self, asks, num_layers, stops):
        self.used.append(num_layers)
        self.stops.append(stops)
        return [([7] * ask.max_depth, [0.9] * ask.max_depth) for ask in asks]

    def judge(self, pieces):
        return [
            [
                [(7 if self.right(after, start + i) else 8, self.sure(after, start + i)) for i in range(len(hidden))]
                for after in self.exits
            ]
            for _, start, hidden in pieces
        ]

    def close(self, seq):
        pass


def drive(drafter: Drafter, model: Exits, seq: Sequence, rounds: int) -> None:
    """Commit what the exit would have right, at most two tokens, and one more; all tokens are 7."""
    drafter._model = model
    for _ in range(rounds):
        tree = drafter.propose([Ask(seq, 8, 8)])[0]
        tree.source = "layer_skip"
        accepted = 0
        while accepted < min(len(tree), 2) and model.right(model.used[-1], len(seq.tokens) - 1 + accepted):
            accepted += 1
        seq.tokens += [7] * (accepted + 1)
        seq.num_computed = len(seq.tokens) - 1
        drafter.observe(seq, tree, list(range(accepted)))
        drafter.ingest(seq, torch.zeros(accepted + 1, 3, 4), seq.num_computed - accepted - 1)


def fresh() -> Drafter:
    return attached(technique.load(DRAFTERS, "layer_skip:max_depth=4", Drafter))


def attached(drafter: Drafter) -> Drafter:
    drafter.hidden_layers = tuple(after - 1 for after in Exits.exits)
    return drafter


def test_the_estimate_is_the_papers():
    """Sums equal those written out over the rounds.

    Matches of round r count OMEGA^(R - r), and so do probabilities. A sequence begins with four observations of what
    was known."""
    rng, seq, drafter = random.Random(1), sequence([1, 2, 3]), fresh()
    truth = {(after, at): (rng.random() < 0.3 + after / 15, rng.random()) for after in Exits.exits for at in range(400)}
    model = Exits(lambda after, at: truth[after, at][0], lambda after, at: truth[after, at][1])
    rounds: list[range] = []
    judge = model.judge

    def heard(pieces):
        rounds.extend(range(start, start + len(hidden)) for _, start, hidden in pieces)
        return judge(pieces)

    model.judge = heard
    drive(drafter, model, seq, 60)
    assert len(rounds) > 20 and sum(map(len, rounds)) > len(rounds), "rounds of several rows"
    for after in Exits.exits:
        sums = torch.tensor(START) * BEGIN / (START[0] + START[1]) * OMEGA ** len(rounds)
        for r, rows in enumerate(rounds, 1):
            for at in rows:
                right, sure = truth[after, at]
                sums += OMEGA ** (len(rounds) - r) * torch.tensor(
                    [right, not right, right * sure, (not right) * sure], dtype=torch.float
                )
        found = drafter._evidence(seq, after)
        assert found.share == pytest.approx(float(sums[0] / (sums[0] + sums[1])), rel=1e-4)
        assert found.threshold == pytest.approx(float(sums[2] / sums[0] + sums[3] / sums[1]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "shares, depths", [((0.2, 0.7, 0.9), 4), ((0.6, 0.7, 0.8), 8), ((0.0, 0.1, 0.2), 4), ((0.95, 0.99, 1.0), 4)]
)
def test_the_choice_is_the_largest_quotient(shares, depths):
    """TPL equals the closed formula for all exits and lengths, with two sequences that differ."""
    drafter = attached(technique.load(DRAFTERS, f"layer_skip:max_depth={depths}", Drafter))
    drafter._model = model = Exits(None)
    seqs = [sequence([1]), sequence([2])]
    best, most = (0, 0), 2 / (12 + 1)
    for after, share in zip(model.exits, shares):
        own = share, share / 2
        for seq, a in zip(seqs, own):
            drafter._known(seq).exits[after] = Evidence(100 * a, 100 * (1 - a), 1.0, 1.0)
        for d in range(1, depths + 1):
            tokens = sum(d + 1 if a == 1 else (1 - a ** (d + 1)) / (1 - a) for a in own)
            if tokens / (d * (after + 1) + 12 + 2) > most:
                best, most = (after, d), tokens / (d * (after + 1) + 12 + 2)
    assert drafter._choose(seqs) == best


def test_an_exit_that_never_drafted_is_found():
    """The context changes: the sixth layer, which knew nothing, is right from the hundredth token on, and the third no
    longer."""
    seq, drafter = sequence([1, 2, 3]), fresh()
    model = Exits(lambda after, at: after == 3 if at < 100 else after == 6)
    drive(drafter, model, seq, 35)
    assert set(model.used[-10:]) == {3} and len(seq.tokens) > 100
    drive(drafter, model, seq, 60)
    assert set(model.used[-10:]) == {6}


def test_with_shadows_of_the_drafting_exit_alone_it_is_not_found():
    """The negative control: without DEL's judgement of exits that do not draft, it fails."""
    seq, drafter = sequence([1, 2, 3]), fresh()
    model = Exits(lambda after, at: after == 3 if at < 100 else after == 6)
    learn = drafter._learn
    drafter._learn = lambda seq, after, verdicts: (
        learn(seq, after, verdicts) if model.used[-1:] in ([], [after]) else None
    )
    drafter._all = {6: Evidence(0.0, 4.0, 0.0, 1.0), 9: Evidence(0.0, 4.0, 0.0, 1.0)}
    drive(drafter, model, seq, 95)
    assert 6 not in model.used


def test_without_hidden_states_an_exit_is_known_by_what_was_accepted(monkeypatch):
    """With the switch off no layer is read, and the engine's outputs stay."""
    monkeypatch.setattr(layer_skip, "SHADOWS", False)
    d = driver("layer_skip:exits=2")
    assert d.engine.runner.parts.taps is None
    fade(d, 2, 0.0)
    d.run(requests(d, 0.0, max_tokens=40))
    assert drafter_of(d)._all[2].share > 0.95 and d.engine.stats().accepted_tokens > 40
    d.close()


def test_rows_wait_where_nothing_is_drafted():
    """Useless exits cost one call of the head for eight rows, and no drafts."""
    seq, drafter = sequence([1, 2, 3]), fresh()
    model, calls = Exits(lambda after, at: False), []
    judge = model.judge
    model.judge = lambda pieces: calls.append(sum(len(h) for _, _, h in pieces)) or judge(pieces)
    drive(drafter, model, seq, 200)
    assert set(calls[-10:]) == {8} and len(model.used) < 15


def test_a_static_exit_always_drafts_as_many():
    """The baseline that the choice is compared with: one exit, one length, no threshold, and no judging."""
    d = driver("layer_skip:exits=2,static=3", max_num_seqs=4)
    d.run(requests(d, 0.0, max_tokens=30))
    stats = d.engine.stats()
    assert stats.drafted_tokens > 2.5 * stats.drafts and not drafter_of(d).hidden_layers
    d.close()
    for options in ("exits=1+2,static=2", "exits=2,static=9", "static=2"):
        with pytest.raises(ConfigError, match="static drafts come from one exit"):
            driver(f"layer_skip:{options}")
