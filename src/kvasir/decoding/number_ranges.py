"""Regexes of the JSON numbers in a range with exact bounds of any size, and which numbers the grammar library keeps
exactly.

The library reads every number as a 64-bit float and its reader rounds: 1234567890123456789 becomes ...768. It keeps a
number whose digits make an integer below 2^53 with at most 22 decimal places, because one exact division reads it.
"""

from __future__ import annotations

from decimal import Decimal

EXACT = 1 << 53
PLACES = 22
# Bounds have at most this many digits: the regex grows with them.
MAX_DIGITS = 300


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


def numbers(low: int | None, high: int | None, above: bool = False, below: bool = False) -> str:
    """A regex of the numbers, without exponents, between two integers. ``above``, ``below``: without the bound itself.

    Raises ValueError when there are none."""
    if low is not None and high is not None and (low > high or low == high and (above or below)):
        raise ValueError(f"no number lies between {low} and {high}")
    parts = []
    if low is None or low < 0:
        # Magnitudes: the bounds change places. Zero itself is not written with a sign.
        nearest, without = (-high, below) if high is not None and high < 0 else (0, True)
        if (magnitudes := _magnitudes(nearest, without, None if low is None else -low, above)) is not None:
            parts.append(f"-{magnitudes}")
    if high is None or high >= 0:
        nearest, without = (low, above) if low is not None and low >= 0 else (0, False)
        if (magnitudes := _magnitudes(nearest, without, high, below)) is not None:
            parts.append(magnitudes)
    return _either(parts)


def _magnitudes(low: int, above: bool, high: int | None, below: bool) -> str | None:
    """Numbers from ``low`` (0 or more) to ``high``; None: there are none."""
    parts = []
    if low == high:
        return None if above or below else rf"{low}(\.0+)?"
    parts.append(rf"{low}\.[0-9]*[1-9][0-9]*" if above else rf"{low}(\.[0-9]+)?")
    if high is None or high - low > 1:
        parts.append(rf"{_naturals(low + 1, None if high is None else high - 1)}(\.[0-9]+)?")
    if high is not None and not below:
        parts.append(rf"{high}(\.0+)?")
    return _either(parts)


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
