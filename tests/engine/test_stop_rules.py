"""A table for ``until_stop``: where tokens end, and why. Comments name the mutations that the cases kill."""

from __future__ import annotations

import pytest

from kvasir.engine.stop import until_stop
from tests.engine.fake import sequence

EOS, STOP, OTHER = 2, 307, 309


CASES = {
    # name: (request and state, sampled tokens, (tokens kept, reason, stop id))
    "no rule holds": (dict(max_tokens=8), [OTHER, OTHER], ([OTHER, OTHER], None, None)),
    "nothing was sampled": (dict(max_tokens=8), [], ([], None, None)),
    # Mutation: the length is looked at before the stop tokens.
    "a stop token is the last one allowed": (dict(max_tokens=2), [OTHER, STOP], ([OTHER, STOP], "stop", STOP)),
    "EOS is the last token allowed": (dict(max_tokens=2), [OTHER, EOS], ([OTHER, EOS], "stop", None)),
    "the only token allowed is a stop token": (dict(max_tokens=1), [STOP], ([STOP], "stop", STOP)),
    # Mutation: the length is looked at once, after all tokens, so that a stop token beyond it counts.
    "a stop token comes after the last one allowed": (dict(max_tokens=1), [OTHER, STOP], ([OTHER], "length", None)),
    # Mutation: ``sampled[: i]`` for ``sampled[: i + 1]``, and a rule that is only tried on the last token.
    "a stop token is followed by others": (dict(max_tokens=8), [OTHER, STOP, OTHER], ([OTHER, STOP], "stop", STOP)),
    "the first of two stop tokens counts": (dict(max_tokens=8), [EOS, STOP], ([EOS], "stop", None)),
    # Mutation: tokens of earlier steps are not counted, or counted twice.
    "length, with earlier output": (dict(max_tokens=4, output=2), [OTHER] * 3, ([OTHER, OTHER], "length", None)),
    "length not reached, with earlier output": (dict(max_tokens=4, output=2), [OTHER], ([OTHER], None, None)),
    # Mutation: ``count > min_tokens`` for ``count >= min_tokens``, and no look at ``min_tokens`` at all.
    "the stop token is token number min_tokens": (
        dict(max_tokens=8, min_tokens=2),
        [OTHER, STOP],
        ([OTHER, STOP], "stop", STOP),
    ),
    "a stop token comes before min_tokens": (
        dict(max_tokens=8, min_tokens=2),
        [STOP, OTHER],
        ([STOP, OTHER], None, None),
    ),
    "a stop token before min_tokens, then the length": (
        dict(max_tokens=2, min_tokens=2),
        [STOP, OTHER],
        ([STOP, OTHER], "length", None),
    ),
    # Mutation: an EOS that the request names as a stop token is reported as plain EOS although ``ignore_eos`` is set.
    "EOS as a stop token of the request": (
        dict(max_tokens=8, ignore_eos=True, named=True),
        [EOS],
        ([EOS], "stop", EOS),
    ),
    "EOS is ignored": (dict(max_tokens=8, ignore_eos=True), [EOS, OTHER], ([EOS, OTHER], None, None)),
    # Mutation: the request's ``max_tokens`` bounds the output where the context leaves less.
    "the context ends first": (dict(max_tokens=8, context=1), [OTHER, OTHER], ([OTHER], "length", None)),
    # Mutation: the special case of an echo is gone.
    "an echo wants no token": (dict(max_tokens=0), [OTHER], ([], "length", None)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_where_tokens_end_and_why(case):
    given, sampled, (kept, reason, stop) = case
    options = dict(max_tokens=given["max_tokens"], min_tokens=given.get("min_tokens", 0), stop_token_ids=[STOP])
    if given.get("named"):
        options["stop_token_ids"] = [STOP, EOS]
    seq = sequence(5, ignore_eos=given.get("ignore_eos", False), **options)
    seq.tokens += [OTHER] * given.get("output", 0)
    seq.max_output = given.get("context", seq.max_output)
    if not seq.request.params.ignore_eos:
        seq.stop_ids |= {EOS}  # as ``Engine.submit`` does
    before = list(seq.tokens)
    assert until_stop(seq, sampled, {EOS}) == (kept, reason, stop)
    assert seq.tokens == before, "the rules only look"
