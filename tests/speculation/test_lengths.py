"""Length-aware budgets: sequences that are expected to be long draft in full, short ones do not."""

from __future__ import annotations

import random

from kvasir.speculation.lengths import ALL, Lengths
from kvasir.types import Request, SamplingParams, Sequence
from tests.speculation.helpers import driver


def sequence(prompt: int, output: int) -> Sequence:
    seq = Sequence(Request(id="r", prompt_ids=[prompt], params=SamplingParams(), seed=0, max_tokens=999))
    seq.tokens = [prompt] + [7] * output
    return seq


def test_budgets_follow_what_is_known_of_a_prompt():
    lengths = Lengths()
    assert lengths.budget(sequence(1, 5), 8) == 8, "nothing is known yet"
    for _ in range(8):
        for prompt, length in ((1, 10), (2, 50), (3, 200)):
            lengths.ended(sequence(prompt, length))
    for _ in range(8):
        lengths.ended(sequence(1, 10))
    assert [lengths.budget(sequence(prompt, 5), 8) for prompt in (1, 2, 3)] == [0, 4, 8]
    assert lengths.budget(sequence(1, 11), 8) == 8, "it has outlived its likes"
    assert lengths.budget(sequence(4, 5), 8) == 4, "a new prompt is judged by all"
    assert lengths.budget(sequence(4, 60), 8) == 8


def test_history_is_bounded_and_sorted():
    lengths, rng = Lengths(), random.Random(0)
    for i in range(3 * ALL):
        lengths.ended(sequence(i, rng.randrange(300)))
    assert len(lengths._all) == len(lengths._order) == ALL and lengths._all == sorted(lengths._order)


def test_only_whole_outputs_are_known_of():
    d = driver("suffix", draft_control="length")
    try:
        whole, cut = (
            d.request(name, [301, 302, 303], max_tokens=6, ignore_eos=True, temperature=0.0, seed=1)
            for name in ("whole", "cut")
        )
        d.submit(whole)
        d.submit(cut)
        while not d.outputs.get(("cut", 0)):
            d.step()
        d._take(d.engine.cancel("cut"))
        d.run([])
        assert d.outputs["cut", 0].finish_reason == "cancelled" and d.engine.proposals.drafting._lengths._all == [6]
    finally:
        d.close()
