"""Several tokens at once give the same text as one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from kvasir.models.text_stream import WindowStream
from kvasir.models.tokenizer import Tokenizer
from tests.models.small_tokenizers import KINDS, make


def pieces(ids: list[int], cuts: set[int]) -> list[list[int]]:
    places = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    return [ids[a:b] for a, b in zip(places, places[1:])]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_equal_single_tokens(kind, data):
    """The ids may be anything, after any prompt: invalid UTF-8, characters cut in two, special tokens, unknown ids."""
    tokenizer = make(kind)
    ids = st.lists(st.integers(0, tokenizer.size + 2), max_size=24)
    prompt, reply, cuts = data.draw(ids), data.draw(ids), data.draw(st.sets(st.integers(1, 23)))
    skip = tokenizer.special_ids if data.draw(st.booleans()) else ()
    single, several = tokenizer.stream(prompt, skip), tokenizer.stream(prompt, skip)
    for piece in pieces(reply, cuts):
        assert several.extend(piece) == "".join([single.push(token) for token in piece])
    assert several.flush() == single.flush()


def test_a_character_in_two_pieces_comes_whole():
    ids = make("byte_level").encode("é你🙃", add_special=False)
    for cut in range(len(ids) + 1):
        stream = make("byte_level").stream()
        parts = [stream.extend(ids[:cut]), stream.extend(ids[cut:])]
        assert "".join(parts) == "é你🙃" and "\ufffd" not in parts[0] and stream.flush() == ""
    stream = make("byte_level").stream()
    assert stream.extend(ids[:-1]) + stream.flush() == "é你\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_bytes_are_looked_up_once(kind):
    tokenizer, asked = make(kind), []
    table = type(tokenizer._bytes)(lambda i: asked.append(i) or tokenizer.id_to_token(i), tokenizer._codec)
    assert [table[i] for i in (40, 41, 40)] == [tokenizer.token_bytes(i) for i in (40, 41, 40)] and asked == [40, 41]
    assert table[tokenizer.size] == b"" == table[-1] and tokenizer.size not in table, "ids of no token fill no memory"


@given(st.lists(st.integers(0, 11), max_size=12), st.lists(st.integers(0, 11), max_size=12), st.booleans())
@settings(max_examples=150, deadline=None)
def test_without_a_decoder_words_stand_apart(prompt, reply, skips):
    """Words join as in the library: after a prompt the text begins with a space, otherwise it does not."""
    backend = Backend(
        models.WordLevel(
            {"<end>": 0, "▁a": 1, "<0x41>": 2, "é": 3, **{f"t{i}": i for i in range(4, 10)}}, unk_token="t4"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend, {"eos_token": "<end>"})
    skip = tokenizer.special_ids if skips else frozenset()
    ours, theirs = tokenizer.stream(prompt, skip), WindowStream(backend, prompt, skip)
    assert not isinstance(ours, WindowStream)
    assert [ours.push(token) for token in reply] == [theirs.push(token) for token in reply]
    assert tokenizer.decode(reply, skip_special=skips) == backend.decode(
        [t for t in reply if t not in skip], skip_special_tokens=False
    )
