"""Streaming text: the deltas add up to the whole text, for every kind of tokenizer and every grouping of tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.api.text.detokenize import Detokenizer
from kvasir.types import SamplingParams
from tests.models.small_tokenizers import KINDS, make


def run(kind, ids, cuts=(), prompt=(), finished=True, stopped=False, **params):
    """All deltas of ``ids`` pushed in groups that end at ``cuts``."""
    detokenizer = Detokenizer(make(kind), prompt, SamplingParams(**params))
    edges = [0, *sorted(set(cuts) & set(range(1, len(ids)))), len(ids)]
    deltas = [
        detokenizer.push(ids[a:b], finished and b == len(ids), stopped and b == len(ids))
        for a, b in zip(edges, edges[1:])
    ]
    return deltas or [detokenizer.push([], finished)]


def text(deltas):
    return "".join(d.text for d in deltas)


def ids_of(kind):
    return st.lists(st.integers(0, make(kind).size - 1), max_size=25)


# --------------------------------------------------------------------------------------------------- sums of deltas


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_deltas_add_up(kind, data):
    tokenizer, ids, cuts = make(kind), data.draw(ids_of(kind)), data.draw(st.sets(st.integers(1, 25)))
    for skip in (True, False):
        assert text(run(kind, ids, cuts, skip_special_tokens=skip, ignore_eos=True)) == tokenizer.decode(
            ids, skip_special=skip
        )


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece"])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_decode_equals_the_library(kind, data):
    tokenizer, ids = make(kind), data.draw(ids_of(kind))
    assert tokenizer.decode(ids, skip_special=False) == tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(
        [i for i in ids if i not in tokenizer.special_ids], skip_special_tokens=False
    )


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_first"])
@given(st.text(max_size=12), st.sets(st.integers(1, 40)))
@settings(max_examples=60, deadline=None)
def test_byte_fallback_equals_the_library_on_text(kind, words, cuts):
    """For bytes that are not UTF-8 the library writes one U+FFFD for a whole run; a stream cannot do that."""
    tokenizer = make(kind)
    ids = tokenizer.encode(words, add_special=False)
    assert text(run(kind, ids, cuts)) == tokenizer._backend.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=50, deadline=None)
def test_text_continues_its_prompt(kind, data):
    """After a prompt, the deltas are what the whole text has in addition to the prompt's, including a space or half a
    character at the border."""
    tokenizer = make(kind)
    if kind == "wordpiece":
        prompt = tokenizer.encode(data.draw(st.sampled_from(["hello there", "the quick", "a"])), add_special=False)
    else:
        prompt = data.draw(ids_of(kind))
    ids, cuts = data.draw(ids_of(kind)), data.draw(st.sets(st.integers(1, 25)))
    before = tokenizer.stream(skip=tokenizer.special_ids)
    shown = "".join(before.push(i) for i in prompt)
    assert shown + text(run(kind, ids, cuts, prompt)) == tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_characters_come_whole(kind):
    ids = make(kind).encode("é🙂你", add_special=False)
    pieces = [d.text for d in run(kind, ids, range(len(ids)))]
    assert "".join(pieces) == "é🙂你" and not any("\ufffd" in p for p in pieces) and "" in pieces
    cut = run(kind, make(kind).encode("a🙂", add_special=False)[:-1], finished=True)
    assert text(cut).startswith("a\ufffd")


def test_leading_space():
    ids = make("sentencepiece").encode("Hello there", add_special=False)
    assert text(run("sentencepiece", ids)) == "Hello there"
    assert text(run("sentencepiece", ids, prompt=ids)) == " Hello there"
    assert text(run("sentencepiece", ids, prompt=[1])) == "Hello there"  # <s> is no text


def test_windows_stay_short(monkeypatch):
    """The work per token is constant, even when tokens add no text or never complete a character."""
    tokenizer, seen = make("wordpiece"), []

    class Library:
        def decode(self, ids, skip_special_tokens):
            seen.append(len(ids))
            return "\ufffd" if len(seen) % 2 else ""

    stream = tokenizer.stream()
    monkeypatch.setattr(stream, "_backend", Library())
    for _ in range(300):
        stream.push(5)
    assert max(seen) < 50


# --------------------------------------------------------------------------------------------------------- stop strings


def plain_stop(tokenizer, ids, stops, include, min_tokens=0):
    """The reference: after each token, look for a stop string in the whole text so far."""
    stream, so_far, since = tokenizer.stream(skip=tokenizer.special_ids), "", 0
    for i, token in enumerate([*ids, None]):
        so_far += stream.flush() if token is None else stream.push(token)
        count = min(i + 1, len(ids))
        if count < min_tokens:
            since = len(so_far)
            continue
        found = [(at, len(s), s) for s in stops if (at := so_far.find(s, since)) >= 0]
        if found:
            at, length, stop = min(found)
            return so_far[: at + length * include], stop, count
    return so_far, None, len(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_stop_strings(kind, data):
    tokenizer = make(kind)
    ids = [i for i in data.draw(ids_of(kind)) if i not in tokenizer.eos_ids]
    full = tokenizer.decode(ids)
    ends = st.integers(0, len(full))
    cut_out = st.tuples(ends, ends).map(lambda e: full[min(e) : max(e)]).filter(bool) if full else st.nothing()
    stops = data.draw(
        st.lists(st.one_of(cut_out, st.sampled_from(["the", "aa", "ab", " ", "\ufffd"])), min_size=1, max_size=3)
    )
    include, min_tokens = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 3]))
    deltas = run(
        kind,
        ids,
        data.draw(st.sets(st.integers(1, 25))),
        stop=tuple(stops),
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    expected, stop, count = plain_stop(tokenizer, ids, stops, include, min_tokens)
    assert text(deltas) == expected
    assert next((d.stop for d in deltas if d.stop), None) == stop
    assert sum(d.num_tokens for d in deltas) == count


def test_stop_across_tokens_is_held_back_and_trimmed():
    tokenizer = make("byte_level")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["END", "E!"]))
    seen = [detokenizer.push(tokenizer.encode(c, add_special=False)) for c in "xEEN."]
    assert [d.text for d in seen] == ["x", "", "E", "", "EN."]
    seen = [detokenizer.push(tokenizer.encode(c, add_special=False)) for c in "yENDz"]
    assert [(d.text, d.stop, d.num_tokens) for d in seen] == [
        ("y", None, 1),
        ("", None, 1),
        ("", None, 1),
        ("", "END", 1),
        ("", None, 0),
    ]
    assert detokenizer.push([5], True).text == ""


def test_held_text_is_given_out_at_the_end():
    tokenizer = make("byte_level")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["END"]))
    assert detokenizer.push(tokenizer.encode("aEN", add_special=False)).text == "a"
    assert detokenizer.push([], finished=True).text == "EN"


def test_stop_within_one_push_counts_tokens():
    tokenizer = make("byte_level")
    ids = [i for c in "ab.cd" for i in tokenizer.encode(c, add_special=False)]
    [delta] = run("byte_level", ids, stop=(".",))
    assert (delta.text, delta.stop, delta.num_tokens, delta.offsets) == ("ab", ".", 3, [0, 1, 2])


# ------------------------------------------------------------------------------------------------------------- the rest


def test_the_token_that_ends_is_not_shown():
    """The engine decides which token ends a branch, whatever the tokenizer calls an end."""
    tokenizer = make("byte_level")
    ids = [i for c in "ab" for i in tokenizer.encode(c, add_special=False)]
    for cuts in ((), (1,)):
        assert text(run("byte_level", ids, cuts, stopped=True)) == "a" and text(run("byte_level", ids, cuts)) == "ab"
        assert text(run("byte_level", ids, cuts, stopped=True, include_stop_str_in_output=True)) == "ab"
        eos = [ids[0], tokenizer.eos_ids[0]]
        assert text(run("byte_level", eos, cuts, stopped=True, skip_special_tokens=False)) == "a"
        assert text(run("byte_level", eos, cuts, skip_special_tokens=False)) == "a<|im_end|>"


def test_kept_marks_and_no_text():
    tokenizer = make("byte_level")
    start, a = tokenizer.token_to_id("<|im_start|>"), tokenizer.encode("a", add_special=False)[0]
    assert Detokenizer(tokenizer, [], SamplingParams(), keep_ids={start}).push([start, a], True).text == "<|im_start|>a"
    delta = Detokenizer(tokenizer, [], SamplingParams(detokenize=False, stop=["a"])).push([a, a], True)
    assert (delta.text, delta.stop, delta.num_tokens) == ("", None, 2)


def test_offsets():
    tokenizer = make("byte_level")
    ids = tokenizer.encode("é the 🙂 fox", add_special=False)
    deltas = run("byte_level", ids, range(len(ids)))
    offsets = [o for d in deltas for o in d.offsets]
    assert len(offsets) == len(ids) and offsets == sorted(offsets) and offsets[0] == 0
    assert all(tokenizer.decode(ids[:i]).rstrip("\ufffd") == "é the 🙂 fox"[:o] for i, o in enumerate(offsets))
