"""Logit processors: their waves, states and traces, row by row along drafts, against a scalar account of each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvasir.decoding import steering
from kvasir.decoding.processor import PACKAGE, Processor
from kvasir.decoding.processors.budget import BudgetProcessor
from kvasir.decoding.processors.cyclic_reflex import Config, CyclicReflex, wave
from kvasir.decoding.sampler import Sampler
from kvasir.decoding.thinking import begin, follow, word_ids
from kvasir.errors import ConfigError
from kvasir.technique import load
from kvasir.types import ProcessorParams, Thinking
from tests.decoding.helpers import EOS, TableModel, decode, sequence

VOCAB = 24
START, END, END2, WAIT, WAIT2, WORD, OTHER = 20, 21, 22, 10, 11, 12, 13
INSIDE = Thinking((START,), (END,), "inside", "</t>")
TWO = Thinking((START,), (END, END2), "inside", "</t>")


def encode(text: str) -> list[int]:
    """Token ids of the words that these tests use."""
    return {"Wait": [WAIT], "Wait then": [WAIT, WAIT2], "word": [WORD], " word": [OTHER], "so": [14, 15], "!": [16]}[
        text
    ]


def params(spec: str, thinking: Thinking | None = INSIDE) -> ProcessorParams:
    return ProcessorParams(spec, load(PACKAGE, spec, Processor).prepare(encode, thinking), thinking)


WORDS = "words=word"
SPECS = {
    "wave": [f"cyclic_reflex:amplitude=5,period=9,{WORDS}"],
    "shifted wave": [f"cyclic_reflex:amplitude=3,period=7,shift=0.4,start=2,stop=20,{WORDS}"],
    "constant": [f"constant:value=-2,{WORDS}"],
    "tip": [f"tip:alpha=4,beta=5,{WORDS}"],
    "budget": ["budget:max_thinking=9"],
    "budget, long texts": ["budget:max_thinking=12,min_thinking=6,num_ignore=2,wait=Wait then,end=so</t>!"],
    "all": [f"cyclic_reflex:period=6,{WORDS}", f"constant:{WORDS}", f"tip:beta=3,{WORDS}", "budget:max_thinking=8"],
}


# ------------------------------------------------------------------------------------------------------------- the wave


@pytest.mark.parametrize(
    "period, amplitude, shift", [(1200, 5.0, 0.0), (600, 1.0, 0.25), (80, 3.0, 0.5), (8, 5.0, 0.0)]
)
def test_the_wave_is_continuous_has_zero_mean_and_peaks_where_the_formula_says(period, amplitude, shift):
    config = Config(amplitude=amplitude, period=period, shift=shift)
    values = [wave(i, config) for i in range(3 * period)]
    assert max(abs(a - b) for a, b in zip(values, values[1:])) <= 4 * amplitude / period + 1e-9
    assert abs(sum(values[:period])) < 1e-6 * period
    peak = round((0.25 - shift) % 1 * period)
    assert values[peak] == pytest.approx(amplitude) and values[(peak + period // 2) % period] == pytest.approx(
        -amplitude
    )
    assert values[:period] == pytest.approx(values[period : 2 * period])


def test_words_count_with_and_without_a_space():
    assert word_ids(encode, "word", "") == (WORD, OTHER)
    assert word_ids(encode, "word", "4|5|4") == (4, 5)
    with pytest.raises(ConfigError, match="none of them is a single token"):
        word_ids(lambda text: [1, 2], "word", "")
    with pytest.raises(ConfigError, match="separated by"):
        word_ids(encode, "word", "4|x")


# --------------------------------------------------------------------------------------------- thinking, token by token


def test_a_thought_is_followed_through_marks_of_any_length():
    mark = Thinking((1, 2), (3, 3, 4), "before")
    text = [9, 1, 1, 2, 9, 3, 3, 3, 4, 9]
    phases = [follow(mark, begin(mark), text[:n]).phase for n in range(len(text) + 1)]
    assert phases == ["before"] * 4 + ["inside"] * 5 + ["after"] * 2
    assert follow(mark, begin(mark), text[:-1]).length == 2  # 9 and the first 3


# ------------------------------------------------------------------------------------------------------ in the pipeline


def run(specs, *, draft=None, temperature=1.0, seed=7, length=40, table=0, reopen_every=0, thinking=INSIDE, **more):
    sampler = Sampler(VOCAB, VOCAB, 4, "cpu", (EOS,))
    seq = sequence(2, seed=seed, temperature=temperature, ignore_eos=True, **more)
    seq.request.processors = [params(spec, thinking) for spec in specs]
    return decode(sampler, TableModel(VOCAB, table), seq, length, draft, reopen_every)


def chains(seq):
    """Drafts that are often right: what plain decoding gave, with a mistake here and there."""
    rng = random.Random(seq.num_tokens)
    truth = chains.truth[seq.num_output : seq.num_output + rng.randint(0, 5)]
    return [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in truth], None


def trees(seq):
    """Two branches, of which one is often right."""
    chain, _ = chains(seq)
    wrong = [END, WORD, WAIT][: len(chain)]
    parents = [*range(-1, len(chain) - 1), *([-1] if wrong else []), *range(len(chain), len(chain) + len(wrong) - 1)]
    return chain + wrong, [-1, *(p + 1 for p in parents)] if chain else None


@pytest.mark.parametrize("draft", [chains, trees])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_drafts_change_no_token(specs, temperature, draft):
    for table in range(3):
        plain, error, steps = run(specs, temperature=temperature, table=table)
        assert error is None
        chains.truth = plain
        found, error, fewer = run(specs, draft=draft, temperature=temperature, table=table)
        assert (found, error) == (plain, None) and fewer < steps


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_a_sequence_that_starts_again_has_the_same_state(specs):
    assert run(specs, reopen_every=3)[0] == run(specs)[0]
    assert any(run(specs, table=t)[0] != run([], table=t)[0] for t in range(8))  # the processors do something


def one_state_a_step(self, index, path, in_flight):
    return BIAS(self, index - len(path), [], in_flight)


def first_index(self, index, path, in_flight):
    return BIAS(self, index - len(path), path, in_flight)


def end_in_drafts(self, state, path):
    """Force from what an unverified draft holds: the state takes it for the sequence's own text."""
    return FORCE(self, self.advance(state, path), path)


BIAS, FORCE = steering.Steering.bias, BudgetProcessor.force


@pytest.mark.parametrize(
    "specs, owner, name, mutation",
    [
        ("tip", steering.Steering, "bias", one_state_a_step),
        ("wave", steering.Steering, "bias", first_index),
        ("budget", BudgetProcessor, "force", end_in_drafts),
    ],
)
def test_the_wrong_state_of_a_row_is_seen(monkeypatch, specs, owner, name, mutation):
    """Negative controls: one state a step, the index of the step's first row, and tokens of unverified drafts."""
    differ = 0
    for table in range(6):
        chains.truth = run(SPECS[specs], table=table)[0]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mutation)
            differ += run(SPECS[specs], draft=chains, table=table)[0] != chains.truth
    assert differ


def test_an_end_in_an_unverified_draft_ends_nothing(monkeypatch):
    """A draft proposes the end mark in a branch that is not taken: the wave goes on. Negative control: a processor that
    keeps what it saw in drafts."""

    def wrong_branch(seq):
        return [END, END], [-1, 0, 0]

    plain = run(SPECS["wave"], thinking=INSIDE, logit_bias={END: -100})[0]
    assert run(SPECS["wave"], draft=wrong_branch, logit_bias={END: -100})[0] == plain

    def keeps(self, state, index, path):
        if END in path:
            self.ended = True
        return None if getattr(self, "ended", False) else right(self, state, index, path)

    right = CyclicReflex.bias
    monkeypatch.setattr(CyclicReflex, "bias", keeps)
    steering.load_processor.cache_clear()
    assert run(SPECS["wave"], draft=wrong_branch, logit_bias={END: -100})[0] != plain
    steering.load_processor.cache_clear()


# --------------------------------------------------------------------------------------------------------------- budget


def test_biases_of_one_id_add_up_whether_one_number_or_many(monkeypatch):
    """Processors whose biases are arrays, and share ids, against the logit biases of the same sums."""

    class Own(Processor):
        def state(self, prompt, params):
            return None

        def bias(self, state, index, path):
            ids, values = np.array([3, 5, 7]), np.array([1.5, -2.0, 4.0], np.float32)
            return (ids, values) if self.config == "array" else (ids[1:], -0.5)

    monkeypatch.setattr(steering, "load_processor", lambda spec: Own(spec))
    sampler, found = Sampler(VOCAB, VOCAB, 4, "cpu", (EOS,)), []
    for more, specs in (({}, ["array", "number"]), ({"logit_bias": {3: 1.5, 5: -2.5, 7: 3.5}}, [])):
        seq = sequence(2, temperature=1.0, ignore_eos=True, **more)
        seq.request.processors = [ProcessorParams(spec, {}) for spec in specs]
        found.append(decode(sampler, TableModel(VOCAB), seq, 60)[0])
    assert found[0] == found[1]


def test_a_forced_token_that_the_request_rules_out_is_its_fault():
    for more in (dict(allowed_token_ids=(5, 6)), dict(bad_words=[[END]])):
        out, error, _ = run(["budget:max_thinking=3,num_ignore=0"], **more)
        assert len(out) == 3 and error.startswith("no_token_allowed")


class Script:
    """A model that wants to write ``wishes`` by the number of output tokens, and afterwards the letter a = 5."""

    def __init__(self, wishes: dict[int, int], prompt: int = 2) -> None:
        self.wishes, self.prompt = wishes, prompt

    def logits(self, spans):
        rows = []
        for span in spans:
            for i in sorted({i for r in span.want.values() for i in r}):
                row = torch.zeros(VOCAB)
                row[self.wishes.get(span.start + i + 1 - self.prompt, 5)] = 20.0
                rows.append(row)
        return torch.stack(rows)


def trace(spec: str, wishes: dict[int, int], length: int = 12, thinking: Thinking = INSIDE, temperature=0.0):
    sampler = Sampler(VOCAB, VOCAB, 4, "cpu", (EOS,))
    seq = sequence(1, temperature=temperature, ignore_eos=True)
    seq.request.processors = [params(spec, thinking)]
    tokens, error, _ = decode(sampler, Script(wishes), seq, length)
    assert error is None
    return tokens


def test_the_trace_of_think_force_answer():
    assert trace("budget:max_thinking=4", {}, 8) == [5, 5, 5, 5, END, 5, 5, 5]
    assert trace("budget:max_thinking=0", {}, 3) == [END, 5, 5]
    assert trace("budget:max_thinking=4,end=so</t>!", {}, 8) == [5, 5, 14, 15, END, 16, 5, 5]
    assert trace("budget:max_thinking=4,end=!", {}, 8) == [5, 5, 5, 5, END, 16, 5, 5]
    assert trace("budget:max_thinking=9,num_ignore=0", {2: END}, 6) == [5, 5, END, 5, 5, 5]
    assert trace("budget:max_thinking=9", {2: END, 4: END}, 7) == [5, 5, WAIT, 5, END, 5, 5]
    assert trace("budget:wait=Wait then", {1: END, 5: END}, 7) == [5, WAIT, WAIT2, 5, 5, END, 5]
    assert trace("budget:min_thinking=4,num_ignore=0", {1: END, 2: END, 4: END}, 6) == [5, WAIT, WAIT, 5, END, 5]
    ruled_out = trace("budget:min_thinking=3,num_ignore=0,wait=", {1: END, 3: END}, 6)
    assert END not in ruled_out[:3] and ruled_out[3] == END
    # A text that would not fit into the budget is not put in.
    assert trace("budget:max_thinking=3,num_ignore=9", {2: END, 3: END}, 6) == [5, 5, WAIT, END, 5, 5]
    assert trace("budget:max_thinking=3,num_ignore=9,wait=Wait then", {2: END}, 5) == [5, 5, END, 5, 5]


def test_ends_of_two_tokens():
    assert trace("budget:max_thinking=4", {}, 8, TWO) == [5, 5, 5, 5, END, END2, 5, 5]
    # The mark has begun when the budget is reached: its rest is forced.
    assert trace("budget:max_thinking=4,num_ignore=0", {3: END}, 7, TWO) == [5, 5, 5, END, END2, 5, 5]
    assert trace("budget:max_thinking=5", {1: END, 3: END, 4: END2}, 7, TWO) == [5, WAIT, 5, END, END2, 5, 5]


def test_thinking_that_the_model_opens_or_that_is_switched_off():
    before = Thinking((START,), (END,), "before", "</t>")
    assert trace("budget:max_thinking=2", {1: START}, 7, before) == [5, START, 5, 5, END, 5, 5]
    assert trace("budget:max_thinking=2", {}, 4, before) == [5] * 4
    assert trace("budget:max_thinking=0", {}, 4, Thinking((START,), (END,), "after", "</t>")) == [5] * 4


@pytest.mark.parametrize("thinking", [INSIDE, TWO], ids=["one token", "two tokens"])
def test_the_budget_is_never_exceeded_by_one_token(thinking):
    for limit in range(0, 12, 2):
        for table in range(8):
            out = run([f"budget:max_thinking={limit},num_ignore=3"], thinking=thinking, table=table, length=30)[0]
            thought = begin(thinking)
            for n in range(len(out)):
                thought = follow(thinking, thought, out[n : n + 1])
                if thought.phase == "after":
                    break
            assert thought.phase == "after" and thought.length <= limit


def test_a_draw_in_place_of_the_end_means_an_ignored_end():
    """The first token of ``wait`` has the weight of the end mark and not its own."""
    sampler = Sampler(VOCAB, VOCAB, 4, "cpu", (EOS,))
    counts = {True: 0, False: 0}
    for seed in range(400):
        seq = sequence(1, seed=seed, temperature=1.0, ignore_eos=True, logit_bias={WAIT: 3.0})
        seq.request.processors = [params("budget")]
        tokens, _, _ = decode(sampler, TableModel(VOCAB, 5), seq, 1)
        counts[tokens == [WAIT]] += 1
        assert tokens != [END]
    weights = TableModel(VOCAB, 5).row([3, 4]).double()
    weights[WAIT] = -torch.inf
    p = weights.softmax(0)[END].item()
    assert abs(counts[True] - 400 * p) < 4 * (400 * p * (1 - p)) ** 0.5 + 1
