"""The suffix automaton equals brute force, the C version equals the Python one, memory is bounded, and the drafter
works on top.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.kernels.native.library import Native
from kvasir.speculation import suffixes
from kvasir.speculation.drafter import DRAFTERS, Ask, Drafter
from kvasir.speculation.drafters import suffix
from kvasir.speculation.drafters.suffix import GENERATIONS, Config, Suffix
from kvasir.speculation.suffixes import CONTEXT, Automaton
from kvasir.speculation.suffixes_native import native
from kvasir.types import Request, SamplingParams, Sequence

needs_native = pytest.mark.skipif(native().library is None, reason=f"no native code: {native().reason}")
BYTES_A_TOKEN = (
    150  # of a generation, at most, in C: two states and three edges in blocks that double, of arrays that double
)


def sequence(tokens: list[int], tenant: str = "", branch: int = 0) -> Sequence:
    return Sequence(
        Request(id="r", prompt_ids=tokens, params=SamplingParams(), seed=0, max_tokens=99, tenant=tenant), branch
    )


def load(options: str = "") -> Suffix:
    return technique.load(DRAFTERS, f"suffix:{options}", Drafter)


# ------------------------------------------------------------------------------------------------------------ automaton


@pytest.mark.parametrize("seed", range(4))
def test_the_automaton_counts_like_brute_force(seed):
    """Several texts, extended in turns: every substring is found with its number of places, and no other string is."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[], [], []]
    automaton, last = Automaton(), [0, 0, 0]
    for _ in range(60):
        i = rng.randrange(3)
        token = rng.randrange(3)
        texts[i].append(token)
        last[i] = automaton.extend(last[i], token)
    counts = Counter(tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1))
    for text in {*counts, *(tuple(rng.randrange(3) for _ in range(6)) for _ in range(50))}:
        state = 0
        for token in text:
            state = automaton.nexts[state].get(token, -1)
            if state < 0:
                break
        assert (automaton.counts[state] if state > 0 else 0) == counts[text], text
    state = length = 0
    foreign: list[int] = []
    for _ in range(60):
        foreign.append(rng.randrange(3))
        state, length = automaton.follow(state, length, foreign[-1])
        longest = next(n for n in range(len(foreign), -1, -1) if n == 0 or tuple(foreign[-n:]) in counts)
        assert length == longest


def test_a_text_read_twice_takes_its_memory_once():
    automaton = Automaton()
    for _ in range(5):
        last = 0
        for token in range(100):
            last = automaton.extend(last, token)
    assert automaton.num_tokens == 100 and automaton.counts[last] == 5


# --------------------------------------------------------------------------------------------------- C against Python


class World:
    """Run the same requests with two drafters. Returns the proposals of each, and the tokens they hold."""

    def __init__(self, *drafters: Suffix) -> None:
        self.drafters = drafters
        self.live: list[tuple[Sequence, ...]] = []
        self.proposed: list[list] = [[] for _ in drafters]

    def open(self, prompt: list[int], tenant: str, branches: int) -> None:
        for branch in range(branches):
            self.live.append(tuple(sequence(prompt, tenant, branch) for _ in self.drafters))

    def step(self, picked: list[bool], max_nodes: int, max_depth: int) -> list:
        chosen = [seqs for seqs, wanted in zip(self.live, picked) if wanted]
        for k, (drafter, found) in enumerate(zip(self.drafters, self.proposed)):
            found.append(list(drafter.propose([Ask(seqs[k], max_nodes, max_depth) for seqs in chosen])))
            found.append((drafter._texts.num_tokens, len(drafter._stores)))
        return chosen

    def append(self, seqs: tuple[Sequence, ...], tokens: list[int]) -> None:
        for seq in seqs:
            seq.tokens += tokens

    def close(self, index: int) -> None:
        for drafter, seq in zip(self.drafters, self.live.pop(index)):
            drafter.close(seq)

    def agree(self) -> bool:
        return all(found == self.proposed[0] for found in self.proposed[1:])


def run(world: World, data: st.DataObject, vocabulary: int) -> None:
    """Requests of one and of several branches start, grow (in part by what was proposed), pause and end."""
    tokens = st.integers(0, vocabulary - 1)
    draw = data.draw
    for _ in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(0, 2))):
            world.open(
                draw(st.lists(tokens, max_size=80)), draw(st.sampled_from("ab")), draw(st.sampled_from([1, 1, 3]))
            )
        picked = draw(st.lists(st.booleans(), min_size=len(world.live), max_size=len(world.live)))
        chosen = world.step(picked, draw(st.integers(1, 12)), draw(st.integers(1, 8)))
        trees = world.proposed[0][-2]
        for seqs, tree in zip(chosen, trees):
            world.append(seqs, tree.tokens[: draw(st.integers(0, len(tree)))] + draw(st.lists(tokens, max_size=30)))
        if world.live and draw(st.booleans()):
            world.close(draw(st.integers(0, len(world.live) - 1)))


@needs_native
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_native_proposes_what_python_proposes(data):
    """Trees, estimates, tokens, generations and dropped scopes are all the same, to the bit."""
    vocabulary = data.draw(st.sampled_from([1, 2, 4, 20, 300]))
    config = Config(
        data.draw(st.sampled_from([64, 100, 1000])),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from(["tenant", "problem", "request"])),
    )
    world = World(Suffix(config), Suffix(config, plain=True))
    run(world, data, vocabulary)
    assert world.agree()


def random_world(world: World, seed: int, steps: int, vocabulary: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(vocabulary) for _ in range(200)]
    for _ in range(steps):
        while len(world.live) < 6:
            first = rng.randrange(150)
            prompt = shared[first : first + rng.randrange(50)] + [rng.randrange(vocabulary) for _ in range(10)]
            world.open(prompt, rng.choice("abc"), rng.choice([1, 4]))
        chosen = world.step([rng.random() < 0.8 for _ in world.live], rng.choice([1, 4, 16]), rng.choice([1, 4, 8]))
        for seqs, tree in zip(chosen, world.proposed[0][-2]):
            world.append(
                seqs, tree.tokens[: rng.randrange(5)] + shared[(at := rng.randrange(20)) : at + rng.randrange(8)]
            )
        if rng.random() < 0.4:
            world.close(rng.randrange(len(world.live)))


@needs_native
@pytest.mark.parametrize(
    "options",
    [
        "max_tokens=64,min_match=1",
        "max_tokens=300,scope=problem",
        "max_tokens=100,scope=request,min_match=3",
        "max_tokens=100000,min_match=1",
    ],
)
def test_long_streams_agree_through_generations_and_scopes(options):
    """The same for a token with more followers than are searched one by one: 2,000."""
    drafter = load(options)
    world = World(drafter, drafter.reference())
    world.open([token for other in range(1, 2000) for token in (0, other)] + [0], "a", 1)
    random_world(world, 0, 150, 40)
    assert world.agree() and sum(len(tree) for trees in world.proposed[0][::2] for tree in trees) > 100
    assert any(not tree.is_chain for trees in world.proposed[0][::2] for tree in trees)


@needs_native
@pytest.mark.parametrize("name, value", [("BRANCHES", 1), ("FLOOR", 0.2), ("MAX_COUNTED", 1)])
def test_the_comparison_sees_one_constant_changed(name, value, monkeypatch):
    monkeypatch.setattr(suffixes, name, value)
    world = World(Suffix(Config(min_match=1)), Suffix(Config(min_match=1), plain=True))
    random_world(world, 1, 60, 20)
    assert not world.agree()


def test_without_a_compiler_python_proposes(monkeypatch):
    monkeypatch.setattr(suffix, "native", lambda: Native(None, "none here"))
    drafter = load()
    assert drafter.reference() is None
    assert drafter.propose([Ask(sequence([1, 2, 3, 4, 1, 2]), 3, 3)])[0].tokens == [3, 4, 1]


# --------------------------------------------------------------------------------------------------------------- memory


@needs_native
@pytest.mark.parametrize("vocabulary", [2, 50, 100_000])
def test_a_million_tokens_stay_in_their_bounds(vocabulary):
    """A tenant has two generations. Repeated halves split states; random halves never repeat."""
    limit, drafter = 1 << 13, load(f"max_tokens={1 << 13}")
    rng = np.random.default_rng(0)
    shared, most = rng.integers(0, vocabulary, 500).tolist(), 0
    for _ in range(1000):
        seq = sequence(shared + rng.integers(0, vocabulary, 500).tolist())
        drafter.propose([Ask(seq, 8, 8)])
        drafter.close(seq)
        most = max(most, drafter.state_bytes())
        assert drafter._texts.num_tokens <= 2 * (limit + CONTEXT)
    assert 0 < most <= 2 * limit * BYTES_A_TOKEN
    drafter._stores.clear()
    gc.collect()
    assert drafter.state_bytes() == drafter._texts.num_tokens == 0, "all of it is given back"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("scope", ["tenant", "problem"])
def test_all_scopes_together_are_bounded_and_live_ones_go_on(scope, plain):
    drafter = Suffix(Config(max_tokens=100, scope=scope), plain=plain)
    rng, first = random.Random(0), sequence(list(range(50)), "first")
    for i in range(300):
        seq = sequence([rng.randrange(1000) for _ in range(60)], f"tenant {i}")
        drafter.propose([Ask(first, 4, 4), Ask(seq, 4, 4)])
        first.tokens.append(i % 7)
        drafter.close(seq)
        assert drafter._texts.num_tokens <= GENERATIONS * 100 + 2 * CONTEXT + 60
    assert drafter.propose([Ask(first, 3, 3)])[0].tokens == [i % 7 for i in range(300, 303)], "from what it read since"
    assert len(drafter._stores) < 20
    drafter.close(first)


@pytest.mark.parametrize("plain", [False, True])
def test_a_closed_request_takes_its_texts_along(plain):
    drafter = Suffix(Config(scope="request"), plain=plain)
    seqs = [sequence([1, 2, 3] * 20) for _ in range(10)]
    empty = drafter.state_bytes()
    for _ in range(3):
        assert all(len(tree) for tree in drafter.propose([Ask(seq, 4, 4) for seq in seqs]))
        assert drafter.state_bytes() > empty
        for seq in seqs:
            drafter.close(seq)
            drafter.close(seq)  # once more does nothing
        gc.collect()
        assert drafter.state_bytes() == empty


@needs_native
def test_without_memory_texts_are_dropped_and_reading_goes_on():
    drafter = load()
    seq, texts = sequence([1, 2, 3, 4, 1, 2]), drafter._texts
    drafter.propose([Ask(seq, 3, 3)])
    library, texts.library = (
        texts.library,
        SimpleNamespace(kvasir_suffix_step=lambda *_: -1, kvasir_suffix_clear=texts.library.kvasir_suffix_clear),
    )
    with pytest.raises(MemoryError, match="dropped"):
        drafter.propose([Ask(seq, 3, 3)])
    texts.library = library
    assert texts.num_tokens == 0
    seq.tokens += [3, 4, 1]
    assert drafter.propose([Ask(seq, 2, 2)])[0].tokens == [2, 3], "with the context that the text brings along"


@needs_native
def test_threads_take_turns():
    drafter = load("scope=problem")
    expected = [Suffix(drafter.config, plain=True) for _ in range(4)]
    failed: list[int] = []

    def work(i: int) -> None:
        rng = random.Random(i)
        for _ in range(30):
            prompt = [10 * i + rng.randrange(8) for _ in range(200)]
            seqs = sequence(prompt, str(i)), sequence(prompt, str(i))
            found = [d.propose([Ask(seq, 8, 8)]) for d, seq in zip((drafter, expected[i]), seqs)]
            if list(found[0]) != found[1] or drafter.state_bytes() <= 0:
                failed.append(i)
            drafter.close(seqs[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# -------------------------------------------------------------------------------------------------------------- drafter


@pytest.mark.parametrize("plain", [False, True])
def test_suffix_learns_from_other_requests_of_its_scope_only(plain):
    for scope, same, other in (("tenant", "a", "b"), ("problem", "a", "a")):
        drafter = Suffix(Config(scope=scope), plain=plain)
        first = sequence([1, 2, 3, 4, 5, 6, 7, 8], "a")
        drafter.propose([Ask(first, 4, 4)])
        alike = sequence(first.request.prompt_ids if scope == "problem" else [9], same)
        alike.tokens += [9, 2, 3]
        assert drafter.propose([Ask(alike, 4, 4)])[0].tokens == [4, 5, 6, 7]
        assert drafter.propose([Ask(sequence([9, 2, 3], other), 4, 4)])[0].tokens == []


@pytest.mark.parametrize("plain", [False, True])
def test_suffix_proposes_what_came_most_often(plain):
    drafter = Suffix(Config(), plain=plain)
    tree = drafter.propose([Ask(sequence([1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 0, 9, 1, 2]), 3, 2)])[0]
    assert (tree.tokens, tree.parents, tree.depths) == ([3, 0, 4], [-1, 0, -1], [0, 1, 0]) and tree.est[0] > tree.est[2]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ("max_tokens=10", "between 64"),
        ("max_tokens=100000000", "between 64"),
        ("min_match=0", "at least 1"),
        ("scope=user", "tenant, problem, request"),
    ],
)
def test_options_that_cannot_work_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load(options)
