"""Regexes of number ranges, against every number of small ranges and random numbers of large ones."""

from __future__ import annotations

import itertools
import json
import random
import re
from decimal import Decimal

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.decoding.number_ranges import EXACT, Rounded, integers, is_safe, numbers, read_float
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import ids

ENDS = [None, -1010, -101, -100, -99, -11, -10, -9, -1, 0, 1, 5, 9, 10, 11, 35, 99, 100, 101, 109, 999, 1010]


def test_integers_against_every_number_of_small_ranges():
    for low in ENDS:
        for high in ENDS:
            if low is not None and high is not None and low > high:
                with pytest.raises(ValueError):
                    integers(low, high)
                continue
            pattern = re.compile(integers(low, high))
            for n in range(-1200, 1200):
                right = (low is None or low <= n) and (high is None or n <= high)
                assert bool(pattern.fullmatch(str(n))) == right, (low, high, n)
            assert not any(pattern.fullmatch(text) for text in ("", "-", "-0", "00", "01", "-01", "1.0", "1e1"))


big = st.integers(-(10**40), 10**40) | st.integers(-(2**65), 2**65) | st.integers(-99, 99)


@settings(max_examples=300, deadline=None)
@given(st.none() | big, st.none() | big, big, st.integers(-2, 2))
def test_integers_of_large_ranges(low, high, n, near):
    if low is not None and high is not None:
        low, high = sorted((low, high))
    pattern = re.compile(integers(low, high))
    for value in (n, (low or 0) + near, (high or 0) + near):
        assert bool(pattern.fullmatch(str(value))) == (
            (low is None or low <= value) and (high is None or value <= high)
        )


def _decimal(value):
    return None if value is None else Decimal(value)


def test_numbers_against_tenths():
    for low in map(_decimal, (None, -12, "-1.5", -1, "-0.3", 0, "0.25", 1, 9, 10)):
        for high in map(_decimal, (None, -11, "-1.05", -1, 0, "0.3", 1, "1.11", 2, 12, 101)):
            for above in (False, True):
                for below in (False, True):
                    try:
                        pattern = re.compile(numbers(low, high, above, below))
                    except ValueError:
                        assert low is not None and high is not None
                        assert low > high or low == high and (above or below)
                        continue
                    for tenths in range(-150, 150):
                        value = Decimal(tenths) / 10
                        right = low is None or (value > low if above else value >= low)
                        right &= high is None or (value < high if below else value <= high)
                        for text in {str(value), str(value.quantize(Decimal("0.01")))}:
                            found = bool(pattern.fullmatch(text))
                            assert found == right or (not value and text.startswith("-")), (low, high, text)


places = st.decimals(-20, 20, places=2) | st.decimals(-2, 2, places=5) | st.integers(-12, 12).map(Decimal)


@settings(max_examples=300, deadline=None)
@given(st.none() | places, st.none() | places, places, st.booleans(), st.booleans())
def test_numbers_of_decimal_ranges(low, high, n, above, below):
    if low is not None and high is not None:
        low, high = sorted((low, high))
    try:
        pattern = re.compile(numbers(low, high, above, below))
    except ValueError:
        assert low == high and (above or below)
        return
    near = [end + Decimal(step) for end in (low, high) if end is not None for step in ("-0.000001", "0", "0.000001")]
    for value in (n, Decimal(0), *near):
        right = low is None or (value > low if above else value >= low)
        right &= high is None or (value < high if below else value <= high)
        text = f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
        for form in {text, f"{text}00" if "." in text else f"{text}.00"}:
            assert bool(pattern.fullmatch(form)) == right or form.startswith("-0") and not value, (low, high, form)


FAR = ("-10.5", "-1.5", "-1.01", "-1", "-0.5", "-0.001", "0", "0.001", "0.5", "1", "1.01", "1.5", "10", "10.5")


def test_no_number_outside_a_range_gets_through(compiler, tok):
    """The grammar library lets 0 through where ``{"exclusiveMinimum": 0, "maximum": 0.5}``."""
    for low, high in itertools.combinations(map(Decimal, FAR), 2):
        for above, below in itertools.product((False, True), repeat=2):
            names = ("exclusiveMinimum" if above else "minimum", "exclusiveMaximum" if below else "maximum")
            text = f'{{"type": "number", "{names[0]}": {low}, "{names[1]}": {high}}}'
            pristine = compiler.compile(Grammar("json_schema", text))
            for value in (low, high, (low + high) / 2, Decimal(0)):
                right = (value > low if above else value >= low) and (value < high if below else value <= high)
                forms = f"{value:f}", f"{value:f}0" if "." in f"{value:f}" else f"{value:f}.0"
                found = [_accepts(pristine.copy(), form, tok) for form in forms]
                assert any(found) if right else not any(found), (text, forms)
            zero = low < 0 < high or not low and not above or not high and not below
            assert zero or not _accepts(pristine.copy(), "-0", tok), text


STEPS = ("0.1", "0.05", "0.25", "0.3", "0.125", "2.5", "-0.5", "0.01")
STEP_ENDS = (None, "-1000", "-1.1", "-0.7", "0", "0.3", "0.6", "0.7", "2.1", "1000")


@pytest.mark.parametrize("step", STEPS)
def test_multiples_between_bounds(step, compiler, tok):
    """The grammar library finds no multiple of 0.1 from 0.3 to 0.3, and none at 0.5 of 0.25 above 0."""
    size, served = Decimal(step), 0
    values = {k * size for k in range(-9, 10)} | {Decimal(text) for text in ("0.35", "0.6", "-0.7", "2.1", "900")}
    for low, high in itertools.product(STEP_ENDS, repeat=2):
        for names in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
            given = dict(zip(names, (low, high)))
            text = "".join(f', "{name}": {end}' for name, end in given.items() if end is not None)
            text = f'{{"type": "number", "multipleOf": {step}{text}}}'
            inside = [
                value % size == 0
                and (low is None or value > Decimal(low) or (value == Decimal(low) and names[0] == "minimum"))
                and (high is None or value < Decimal(high) or (value == Decimal(high) and names[0] == "minimum"))
                for value in values
            ]
            try:
                pristine = compiler.compile(Grammar("json_schema", text))
            except RequestError as e:
                assert not any(inside) or "side" in str(e) or "more than" in str(e), text
                continue
            served += any(inside)
            for value, right in zip(values, inside):
                form = f"{value:f}"
                forms = {form, form.rstrip("0").rstrip(".") if "." in form else form}
                found = any(_accepts(pristine.copy(), written, tok) for written in forms)
                assert found == right or value == 0, (text, forms)
    assert served > 25


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_integers_that_are_multiples_of_a_fraction(kind, compiler, tok):
    text = json.dumps({"type": kind, "multipleOf": 0.25, "exclusiveMinimum": 0, "maximum": 1e4})
    assert _accepts(compiler.compile(Grammar("json_schema", text)), "7", tok)


def _accepts(matcher, text, tok):
    return matcher.accept(ids(text, tok[1])) and matcher.is_accepting()


def test_rounded_numbers_keep_their_text():
    assert not isinstance(read_float("0.1"), Rounded) and not isinstance(read_float("1e22"), Rounded)
    assert read_float("0.1000000000000000055").text == "0.1000000000000000055"
    assert isinstance(read_float("1e400"), Rounded) and not is_safe(read_float("1e400"))


def test_the_library_keeps_what_is_called_safe(compiler, tok):
    """Otherwise a number would be changed without a word."""
    rng, lost = random.Random(0), 0
    for _ in range(250):
        number = float(Decimal(rng.randrange(10 ** rng.randint(1, 17))).scaleb(rng.randint(-26, 4)))
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"const": number}))
        inner = llguidance.LLMatcher(compiler._tokenizer, source, log_level=0)
        text = np.format_float_positional(number, trim="-")
        kept = inner.try_consume_tokens(ids(text, tok[1])) == len(text) and inner.is_accepting()
        assert kept or not is_safe(number), (number, text)
        lost += not kept
    assert lost, "the rule is needed"
    for number in (EXACT - 1, 1 - EXACT):
        matcher = compiler.compile(Grammar("json_schema", json.dumps({"const": number})))
        assert matcher.accept(ids(str(number), tok[1])) and matcher.is_accepting()
