"""Regexes of the JSON numbers in a range with exact bounds of any size, and which numbers the grammar library keeps
exactly.

The library reads every number as a 64-bit float and its reader rounds: 1234567890123456789 becomes ...768. It keeps a
number whose digits make an integer below 2^53 with at most 22 decimal places, because one exact division reads it.
"""

from __future__ import annotations

import math
from decimal import Decimal

EXACT = 1 << 53
PLACES = 22
# Bounds have at most this many digits: the regex grows with them.
MAX_DIGITS = 300
# Decimal places of a bound: each nests the regex one level deeper, and the regex library allows 250.
MAX_PLACES = 100
# Multiples of a number that are written one by one.
MAX_MULTIPLES = 1000


class Rounded(float):
    """A number of a JSON text whose float is not its value; ``text`` is what was written."""

    text: str


def read_float(text: str) -> float:
    """The float of a JSON number; ``Rounded`` where its shortest text is another number."""
    value = float(text)
    if Decimal(repr(value)) == Decimal(text):
        return value
    rounded = Rounded(value)
    rounded.text = text
    return rounded


def exact(value: int | float) -> Decimal:
    """The number that a schema means."""
    return Decimal(value) if isinstance(value, int) else Decimal(getattr(value, "text", None) or repr(value))


def is_safe(value: int | float) -> bool:
    """Whether the grammar library keeps this number as it is."""
    if isinstance(value, int):
        return -EXACT < value < EXACT
    if isinstance(value, Rounded):
        return False
    digits, _, power = repr(abs(value)).partition("e")
    whole, _, places = digits.partition(".")
    if not whole.isdigit():
        return False  # infinity
    return abs(int(power or 0) - len(places)) <= PLACES and abs(value) < EXACT and int(whole + places) < EXACT


def is_misread(bounds: list[tuple[str, int | float]]) -> bool:
    """Whether the grammar library may let through a bound that these bounds exclude.

    It does so (1.9.1) with an integer whose other bound lies between it and the next integer away from zero: 0 for
    ``{"exclusiveMinimum": 0, "maximum": 0.5}``. ``bounds``: keywords and numbers that may hold together."""
    read = [(word, exact(value)) for word, value in bounds]
    read = [(word, value) for word, value in read if value.is_finite() and value.adjusted() < MAX_DIGITS]
    for word, value in read:
        side = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(word, 0)
        if not side or value != int(value) or value * side < 0:
            continue
        beyond = [n for w, n in read if w.endswith("aximum" if side > 0 else "inimum")]
        if any(n != int(n) and int(n) == int(value) and n * side > value * side for n in beyond):
            return True
    return False


def is_lost(step: int | float, bounds: list[tuple[str, int | float]]) -> bool:
    """Whether the grammar library may lose multiples of ``step`` between these bounds.

    It rounds them (1.9.1): no multiple of 0.1 from 0.3 to 0.3. And it wants all decimal places of the step, 0.50 for a
    multiple of 0.25, where some bounds allow no zero at the end. ``bounds``: as in
    ``is_misread``."""
    size = exact(step)
    if not size or size == int(size) or not bounds:
        return False
    low = [v for word, value in bounds if word.endswith("inimum") and (v := exact(value)).is_finite()]
    high = [v for word, value in bounds if word.endswith("aximum") and (v := exact(value)).is_finite()]
    if low and high and max(low) <= min(high) and min(high) - max(low) < MAX_MULTIPLES * abs(size):
        return True
    digits = size.normalize().as_tuple()
    uneven = int(digits.exponent) < -1 and 10 % int("".join(map(str, digits.digits)))
    even = all(not word.startswith("e") and exact(value) == int(exact(value)) for word, value in bounds)
    return bool(uneven) and not (even and low and max(low) >= 0)


def multiples(step: Decimal, low: Decimal | None, high: Decimal | None, above: bool, below: bool) -> str:
    """A regex of the multiples of a number between two numbers, without exponents. ``above``, ``below``: without the
    bound itself.

    Raises ValueError when there are none, or too many to write each."""
    if low is None or high is None:
        raise ValueError("with bounds on one side the grammar library would lose some multiples")
    step = abs(step)
    first, last = math.ceil(low / step), math.floor(high / step)
    first, last = first + (above and first * step == low), last - (below and last * step == high)
    if first > last:
        raise ValueError(f"no multiple of {step} lies there")
    if last - first >= MAX_MULTIPLES:
        raise ValueError(f"more than {MAX_MULTIPLES} multiples of {step} lie there")
    found = []
    for value in (i * step for i in range(first, last + 1)):
        whole, _, places = f"{value:f}".partition(".")
        places = places.rstrip("0")
        found.append(rf"{whole}\.{places}0*" if places else rf"{whole}(\.0+)?")
    return _either(found)


def integers(low: int | None, high: int | None) -> str:
    """A regex of the integers from ``low`` to ``high``, without leading zeros and without -0. None: no bound.

    Raises ValueError when there are none."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no integer is at least {low} and at most {high}")
    parts = []
    if low is None or low < 0:
        parts.append(f"-{_naturals(max(1, -high) if high is not None else 1, None if low is None else -low)}")
    if high is None or high >= 0:
        parts.append(_naturals(max(0, low or 0), high))
    return _either(parts)


def numbers(low: Decimal | None, high: Decimal | None, above: bool = False, below: bool = False) -> str:
    """A regex of the numbers, without exponents, between two numbers. ``above``, ``below``: without the bound itself.

    Raises ValueError when there are none."""
    if low is not None and high is not None and (low > high or low == high and (above or below)):
        raise ValueError(f"no number lies between {low} and {high}")
    zero = Decimal(0)
    parts = []
    if low is None or low < 0:
        # Magnitudes: the bounds change places. Zero itself is not written with a sign.
        nearest, without = (high.copy_negate(), below) if high is not None and high < 0 else (zero, True)
        if (magnitudes := _magnitudes(nearest, without, None if low is None else low.copy_negate(), above)) is not None:
            parts.append(f"-{magnitudes}")
    if high is None or high >= 0:
        nearest, without = (low, above) if low is not None and low >= 0 else (zero, False)
        if (magnitudes := _magnitudes(nearest, without, high, below)) is not None:
            parts.append(magnitudes)
    return _either(parts)


def _magnitudes(low: Decimal, above: bool, high: Decimal | None, below: bool) -> str | None:
    """Numbers from ``low`` (0 or more) to ``high``; None: there are none."""
    first, last = int(low), None if high is None else int(high)
    start, end = _places(low), None if high is None else _places(high)
    if first == last:
        parts = [_with_places(first, start, above, end, below)]
    else:
        parts = [_with_places(first, start, above, None, False)]
        if last is None or last - first > 1:
            parts.append(rf"{_naturals(first + 1, None if last is None else last - 1)}(\.[0-9]+)?")
        if last is not None:
            parts.append(_with_places(last, "", False, end, below))
    found = [part for part in parts if part is not None]
    return _either(found) if found else None


def _places(value: Decimal) -> str:
    """The digits behind the point, without zeros at the end."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def _with_places(whole: int, low: str, above: bool, high: str | None, below: bool) -> str | None:
    """The numbers with this integer part and digits behind the point from ``low`` to ``high``; None: there are none."""
    choices, bare = _digits(low, above, high, below)
    if not choices:
        return str(whole) if bare else None
    return rf"{whole}(\.{_either(choices)})?" if bare else rf"{whole}\.{_either(choices)}"


def _digits(low: str | None, above: bool, high: str | None, below: bool) -> tuple[list[str], bool]:
    """Regexes of one digit or more behind a point, from ``low`` to ``high`` (None: no bound), and whether no digit at
    all lies there too."""
    if low == "" and not above:
        low = None
    if low is None and high is None:
        return ["[0-9]+"], True
    if low is None and high == "":
        return ([], False) if below else (["0+"], True)
    if low == "" and high is None:
        return ["[0-9]*[1-9][0-9]*"], False
    if low == "" and high == "":
        return [], False
    least = -1 if low is None else int(low[:1] or 0)
    most = 10 if high is None else int(high[:1] or 0)
    choices = [f"[{least + 1}-{most - 1}][0-9]*"] if most - least > 1 else []
    for digit in sorted({least, most} - {-1, 10}):
        after_low = low[1:] if low is not None and digit == least else None
        after_high = high[1:] if high is not None and digit == most else None
        rest, bare = _digits(after_low, above, after_high, below)
        if rest:
            choices.append(f"{digit}({'|'.join(rest)}){'?' if bare else ''}")
        elif bare:
            choices.append(str(digit))
    return choices, low is None


def _naturals(low: int, high: int | None) -> str:
    """Integers from ``low`` (0 or more) to ``high``, by their number of digits."""
    first = str(low)
    size = len(first)
    if high is None:
        return _either([_same(first, "9" * size), f"[1-9][0-9]{{{size},}}"])
    last = str(high)
    if len(last) == size:
        return _same(first, last)
    parts = [_same(first, "9" * size)]
    if len(last) - size > 1:  # the lengths in between
        parts.append(f"[1-9][0-9]{{{size},{len(last) - 2}}}")
    return _either([*parts, _same("1" + "0" * (len(last) - 1), last)])


def _same(low: str, high: str) -> str:
    """Digits from ``low`` to ``high``, two texts of one length."""
    shared = 0
    while shared < len(low) and low[shared] == high[shared]:
        shared += 1
    head, low, high = low[:shared], low[shared:], high[shared:]
    if not low:
        return head
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _same(low[1:], "9" * rest))
        first += 1
    end = None
    if high[1:].strip("9"):
        end = high[0] + _same("0" * rest, high[1:])
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        parts.append(digit + (f"[0-9]{{{rest}}}" if rest else ""))
    return head + _either(parts + ([end] if end else []))


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
