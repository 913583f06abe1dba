"""Helpers of the tests of grammars: masks as lists of ids, and random walks under them."""

from __future__ import annotations

import numpy as np

from tests.decoding.helpers import EOS

EOT = 2


def allowed(matcher, size):
    mask = np.empty(-(-size // 32), np.int32)
    assert matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids(text, vocab):
    return [vocab[c] for c in text.replace(" ", "Ġ")]


def random_walk(matcher, tok, rng, most=400):
    """Return token ids up to EOS, or None if the walk gets longer than ``most``. It prefers to end, so that walks are
    short."""
    _, vocab, size = tok
    quote = [vocab['"'], vocab["}"], vocab["]"]]
    out = []
    while len(out) < most:
        choices = allowed(matcher, size + 9)
        assert choices and max(choices) < size, "an id outside the tokenizer is allowed, or nothing is"
        ends = [c for c in choices if c in (EOS, EOT)]
        assert bool(ends) == matcher.is_accepting() or matcher.is_stopped()
        if ends and rng.random() < 0.5:
            assert matcher.accept(ends[:1]) and matcher.is_stopped()
            assert allowed(matcher, size + 9) == [EOS, EOT]
            return out
        closing = [c for c in choices if c in quote]
        token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        if token in (EOS, EOT):
            continue
        assert matcher.accept([token])
        out.append(token)
    return None
