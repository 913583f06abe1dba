"""Find a number that a long text names once, at a chosen depth, length and number of rivals.

    ... The secret number of wolf is 48213. ... Tell the secret number of wolf.      ->      Answer: 48213

``filler=prose``: template-like sentences with ``keys`` secret numbers among them. ``filler=pairs``: every line is a
rival, ``Key 4821 is 77193.`` Up to ``asks`` numbers are asked for at once (``Answer: 48213, 01656``), so that a long
text teaches more; ``depth`` places the first one. Lengths count the tokens of the whole prompt in the lab's tokenizer.

Shape suffixes: N problems, S filler sentences (or lines), J secret numbers; the first ones are asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import ASSISTANT, USER, Drawn, Sheet, SheetTask, fold
from kvasir_lab.task import Split
from kvasir_lab.tokenizer import shipped_tokenizer
from kvasir_lab.words import MOODS, NOUNS, PEOPLE, PLACES, THINGS, TIMES

BANK, BANK_SEED = 2048, 5
LONGEST = 1 << 16
STRIDES = tuple(n for n in range(1, 9000) if np.gcd(n, 9000) == 1)
SPACED = tuple(f" {person}" for person in PEOPLE)
PROSE = ("Read this text.", "Tell the secret number of")
PAIRS = ("Read this list.", "Tell key")
SENTENCES = (
    "The {mood} {who} walked to the {place} in the {time}.",
    "Then the {who} found a {thing} near the {place}.",
    "In the {time} the {who} and the {who} sat by the {place}.",
    "The {thing} was {mood}, and so was the {who}.",
    "Nobody at the {place} had ever seen such a {mood} {thing}.",
    '"Give me the {thing}," said the {who}.',
    "All that {time} the {mood} {who} thought of the {thing}.",
    "The {who} went home.",
)


@dataclass(frozen=True)
class Config:
    """The dial.

    ``min_length``..``length``: tokens of the prompt; every length in between is equally likely. ``depth``: share of the
    filler before the needle (0 to 1), or -1 for any. The split ``longer`` goes up to 1.5 times ``length``.
    """

    min_length: int = 128
    length: int = 1024
    depth: float = -1.0
    keys: int = 4
    asks: int = 1
    digits: int = 5
    filler: str = "prose"

    def __post_init__(self) -> None:
        if self.filler not in ("prose", "pairs"):
            raise ConfigError(f"needle: filler='{self.filler}' is neither 'prose' nor 'pairs'")
        if not 1 <= self.keys <= 16:
            raise ConfigError(f"needle: keys={self.keys} must lie in 1..16")
        if not 1 <= self.asks <= self.keys:
            raise ConfigError(f"needle: asks={self.asks} must lie in 1..keys={self.keys}")
        if not 1 <= self.digits <= 9:
            raise ConfigError(f"needle: digits={self.digits} must lie in 1..9")
        if not (self.depth == -1 or 0 <= self.depth <= 1):
            raise ConfigError(f"needle: depth={self.depth} must lie in 0..1, or be -1 for any")
        least = 48 + self.keys * (self.digits + 10)
        if not least <= self.min_length <= self.length <= LONGEST:
            raise ConfigError(
                f"needle: min_length={self.min_length} and length={self.length} must satisfy "
                f"{least} <= min <= length <= {LONGEST} tokens"
            )


@dataclass(slots=True)
class Texts(Drawn):
    """Drawn texts.

    filler [N, S]: sentence numbers, or keys of a list; -1 beyond the last. values [N, S]: numbers of a list's other
    lines. at [N, J]: how much filler stands before each secret. names, numbers [N, J]: the secrets. asked [N]: how many
    are asked for. difficulty: the prompt's length in tokens, too high by less than one sentence (or line).
    """

    filler: np.ndarray
    values: np.ndarray
    at: np.ndarray
    names: np.ndarray
    numbers: np.ndarray
    asked: np.ndarray


@functools.cache
def bank() -> tuple[tuple[str, ...], np.ndarray]:
    """The filler sentences, each after a space, and their lengths in tokens. The same on every machine."""
    rng = np.random.default_rng(BANK_SEED)
    words = {"who": NOUNS, "place": PLACES, "thing": THINGS, "mood": MOODS, "time": TIMES}
    found: dict[str, None] = {}
    while len(found) < BANK:
        text = SENTENCES[rng.integers(len(SENTENCES))]
        for kind, choices in words.items():
            while f"{{{kind}}}" in text:
                text = text.replace(f"{{{kind}}}", choices[rng.integers(len(choices))], 1)
        found[" " + text] = None
    sentences = tuple(found)
    return sentences, np.array([_size(s) for s in sentences])


@functools.cache
def shuffled_keys() -> np.ndarray:
    """All keys (1000 to 9999) in one fixed random order."""
    return 1000 + np.random.default_rng(BANK_SEED).permutation(9000)


def _size(text: str) -> int:
    return len(shipped_tokenizer().encode(text, add_special_tokens=False).ids)


class Needle(SheetTask):
    """Retrieval from a long text at a chosen depth and length."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pairs = self.config.filler == "pairs"

    @functools.cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """Token counts: all but the filler with one number asked, each further name, and one line of a list."""
        opening, question = PAIRS if self.pairs else PROSE
        digits = "1" * self.config.digits
        if self.pairs:
            line, name = _size(f"\nKey 1111 is {digits}."), _size(", 1111")
            secrets = self.config.asks * line
        else:
            line, name = 0, _size(", king")
            secrets = self.config.keys * _size(f" The secret number of king is {digits}.")
        return _size(f"<bos>{USER}{opening}{ASSISTANT}\n{question}.") + name - 1 + secrets, name, line

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Texts:
        c = self.config
        fixed, name, line = self._sizes
        low, high = (c.length + 1, c.length * 3 // 2) if split == "longer" else (c.min_length, c.length)
        length, asked = rng.integers(low, high + 1, count), rng.integers(1, c.asks + 1, count)
        left = length - fixed - (asked - 1) * name
        if self.pairs:
            room, wide = left // line, (high - fixed) // line
            # Keys of a row must differ. A walk through one fixed shuffle ensures it without sorting 9,000 keys for
            # every row.
            stride = np.array(STRIDES)[rng.integers(0, len(STRIDES), count)]
            keys = shuffled_keys()[
                (rng.integers(0, 9000, count)[:, None] + np.arange(wide + c.asks) * stride[:, None]) % 9000
            ]
            names, filler = keys[:, : c.asks], keys[:, c.asks :]
        else:
            sizes = bank()[1]
            filler = rng.integers(0, BANK, (count, int((high - fixed) // sizes.min()) + 1))
            room = (np.cumsum(sizes[filler], axis=1) <= left[:, None]).sum(1)
            names = np.argsort(rng.random((count, len(PEOPLE))), axis=1)[:, : c.keys]
        filler = np.where(np.arange(filler.shape[1]) < room[:, None], filler, -1)
        depth = rng.random(names.shape)
        if c.depth >= 0:
            depth[:, 0] = c.depth
        top, rivals = 10**c.digits, names.shape[1]
        # Numbers are evenly spread from a random start and shuffled, so that those of a text always differ.
        apart = np.arange(rivals) * max(top // (rivals + 1), 1) + rng.integers(0, max(top // 40, 1), names.shape)
        numbers = np.take_along_axis(
            (rng.integers(0, top, count)[:, None] + apart) % top, np.argsort(rng.random(names.shape), axis=1), 1
        )
        values = rng.integers(0, top, filler.shape) if self.pairs else np.zeros_like(filler[:, :0])
        return Texts(length, filler, values, np.round(depth * room[:, None]).astype(np.int64), names, numbers, asked)

    def key(self, drawn: Texts) -> np.ndarray:
        """Hash [N] of the secrets and the first line.

        That tells texts apart without writing thousands of long ones.
        """
        return fold(
            np.concatenate(
                [
                    drawn.names,
                    drawn.numbers,
                    drawn.at,
                    drawn.filler[:, :1],
                    drawn.difficulty[:, None],
                    drawn.asked[:, None],
                ],
                1,
            )
        )

    def ask(self, sheet: Sheet, drawn: Texts) -> None:
        opening, question = PAIRS if self.pairs else PROSE
        body = Sheet(len(drawn))
        wide = int((drawn.filler >= 0).sum(1).max(initial=0))
        if self.pairs:
            for s in range(wide):
                self._line(body, drawn.filler[:, s], drawn.values[:, s])
        else:
            body.put_choice(bank()[0], drawn.filler[:, :wide])
        # Filler number s is sorted behind a secret with s filler sentences before it.
        place = np.repeat(np.arange(wide) + 0.5, body.width // max(wide, 1))
        keys = [np.broadcast_to(place, (len(drawn), body.width))]
        for j in range(drawn.names.shape[1]):
            before = body.width
            self._line(body, drawn.names[:, j], drawn.numbers[:, j])
            keys.append(np.broadcast_to(drawn.at[:, j, None], (len(drawn), body.width - before)))
        body.reorder(np.concatenate(keys, axis=1))
        sheet.put(opening)
        sheet.put_sheet(body)
        sheet.put("\n" + question)
        for j in range(self.config.asks):
            there = j < drawn.asked
            if j:
                sheet.put(",", there)
            if self.pairs:
                sheet.put(" ", there)
                sheet.put_number(drawn.names[:, j], there, digits=4)
            else:
                sheet.put_choice(SPACED, drawn.names[:, j], there)
        sheet.put(".")

    def _line(self, sheet: Sheet, name: np.ndarray, number: np.ndarray) -> None:
        there = name >= 0
        if self.pairs:
            sheet.put("\nKey ", there)
            sheet.put_number(name, digits=4)
            sheet.put(" is ", there)
        else:
            sheet.put(" The secret number of", there)
            sheet.put_choice(SPACED, name)
            sheet.put(" is ", there)
        sheet.put_number(number, there, digits=self.config.digits)
        sheet.put(".", there)

    def solve(self, sheet: Sheet, drawn: Texts, rng: np.random.Generator, wrong: np.ndarray) -> None:
        """Write the answers.

        A slip gives the last rival's number instead of the first one's, or a wrong last digit where there is no rival.
        """
        rival = (
            drawn.numbers[:, -1]
            if drawn.numbers.shape[1] > 1
            else drawn.numbers[:, 0] // 10 * 10 + (drawn.numbers[:, 0] + 1) % 10
        )
        sheet.put("Answer: ")
        for j in range(self.config.asks):
            there = j < drawn.asked
            if j:
                sheet.put(", ", there)
            sheet.put_number(np.where(wrong & (j == 0), rival, drawn.numbers[:, j]), there, digits=self.config.digits)
