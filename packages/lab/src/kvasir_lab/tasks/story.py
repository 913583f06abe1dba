"""Fairy-tale prose from the shipped public-domain children's books, as plain text or asked for in a chat.

``form=prose``: ``<bos>`` and ``length`` - 1 tokens from anywhere in the books or from a story's title on, with loss on
all of them; each story ends with ``<eos>``. ``form=chat``: "Tell me a story about a fox." and a passage whose first
lines mention a fox, or a title and the beginning of that story. Scored by loss, because prose has no right answer.
"""

from __future__ import annotations

import bz2
import functools
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.task import Documents, Problem, Split, Task, encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT_SHARE = 0.015  # Share of every book, taken from its end, that is held out for validation, and again for test.
PASSAGE = (350, 750)  # Least and most characters of a passage in a chat; it ends with a paragraph or a sentence.
SUBJECTS = """king queen prince princess fox wolf bear lion cat dog mouse bird fish frog horse donkey cow goat sheep
goose duck hen eagle raven swan snake dragon giant dwarf witch fairy wizard ogre troll robber soldier sailor fisherman
hunter farmer miller tailor shoemaker shepherd merchant beggar boy girl child mother father brother sister castle palace
cottage forest wood garden mountain river sea island ship treasure gold ring sword apple tree rose flower star moon sun
snow winter summer night""".split()
ASKS = (
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me about {}.",
    "Please tell me a fairy tale about {}.",
    "I would like to hear a story about {}.",
    "Can you tell me a tale about {}?",
    "Write a short story about {}.",
)
OPEN_ASKS = (
    "Tell me a story.",
    "Tell me a fairy tale.",
    "Please tell me a story.",
    "Another story, please.",
    "Write a fairy tale.",
)


@dataclass(frozen=True)
class Config:
    form: str = "chat"
    length: int = 512

    def __post_init__(self) -> None:
        if self.form not in ("chat", "prose"):
            raise ConfigError(f"story: form='{self.form}' is neither 'chat' nor 'prose'")
        if not 8 <= self.length <= 1 << 16:
            raise ConfigError(f"story: length={self.length} must lie in 8..65536 tokens")


@functools.cache
def books(split: Split) -> tuple[tuple[str, ...], ...]:
    """The paragraphs of every shipped book that belong to ``split`` (``longer`` means test).

    Headings start with "## ".
    """
    out = []
    for file in sorted(files("kvasir_lab").joinpath("text").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".txt.bz2"):
            lines = bz2.decompress(file.read_bytes()).decode("utf-8").splitlines()
            first, second = int(len(lines) * (1 - 2 * HELD_OUT_SHARE)), int(len(lines) * (1 - HELD_OUT_SHARE))
            cut = {"train": slice(0, first), "validation": slice(first, second)}.get(split, slice(second, None))
            out.append(tuple(lines[cut]))
    if not out:
        raise ConfigError(
            "the training prose is missing: kvasir_lab/text holds no .txt.bz2 file; reinstall the package"
        )
    return tuple(out)


def plain(paragraphs: tuple[str, ...] | list[str]) -> str:
    """Paragraphs as a reader sees them: an empty line between two, headings without their mark."""
    return "\n\n".join(p.removeprefix("## ") for p in paragraphs)


@functools.cache
def _index(split: Split) -> tuple[list[tuple[str, int, int]], dict[str, list[tuple[int, int]]]]:
    """The places where stories and subjects begin.

    Titles as (name, book, first paragraph), and for each subject the paragraphs (book, number) that mention it in their
    first characters.
    """
    titles, subjects = [], {subject: [] for subject in SUBJECTS}
    words = re.compile(r"[a-z]+")
    for b, book in enumerate(books(split)):
        for i, paragraph in enumerate(book):
            if paragraph.startswith("## "):
                if i + 1 < len(book):
                    titles.append((paragraph[3:], b, i + 1))
            elif len(paragraph) > 120:
                for word in set(words.findall(paragraph[:160].lower())) & subjects.keys():
                    subjects[word].append((b, i))
    return titles, {s: subjects[s] for s in sorted(subjects) if subjects[s]}


def passage(book: tuple[str, ...], start: int) -> str:
    """The text from paragraph ``start``: whole paragraphs within PASSAGE.

    A long last paragraph is cut after a sentence.
    """
    least, most = PASSAGE
    out = ""
    for paragraph in book[start:]:
        if paragraph.startswith("## ") or (len(out) >= least and len(out) + len(paragraph) > most):
            break
        out += ("\n\n" if out else "") + paragraph
        if len(out) > most:
            ends = [m.end() for m in re.finditer(r"[.!?]['\"]?(?= )", out[:most])]
            return out[: ends[-1]] if ends else out[:most]
        if len(out) >= least:
            break
    return out


def _about(name: str) -> str:
    """The subject as a request names it: "the Bronze Ring" for a title, "a fox" for a subject."""
    if name in SUBJECTS:
        return (
            name
            if name in ("gold", "snow", "winter", "summer", "night")
            else ("an " if name[0] in "aeiou" else "a ") + name
        )
    return name[0].lower() + name[1:] if name.split()[0] in ("The", "A", "An", "How", "What", "Why") else name


class Story(Task):
    """Public-domain fairy tales, for free prose and perplexity."""

    scored = "loss"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pool = 30000 if self.config.form == "chat" else 0
        self._tokens: dict[Split, tuple[np.ndarray, np.ndarray]] = {}

    def belongs(self, problem: Problem, split: Split) -> bool:
        return True  # the books themselves are split

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        titles, subjects = _index(split)
        kind = rng.random()
        if kind < 0.25 and titles:
            name, book, start = titles[rng.integers(len(titles))]
        elif kind < 0.35 and titles:
            name, (_, book, start) = "", titles[rng.integers(len(titles))]
        else:
            name = list(subjects)[rng.integers(len(subjects))]
            book, start = subjects[name][rng.integers(len(subjects[name]))]
        ask = ASKS[rng.integers(len(ASKS))].format(_about(name)) if name else OPEN_ASKS[rng.integers(len(OPEN_ASKS))]
        text = passage(books(split)[book], start)
        return Problem(({"role": "user", "content": ask},), text, text)

    def documents(
        self, tokenizer: Tokenizer, rng: np.random.Generator, count: int, split: Split = "train"
    ) -> Documents:
        if self.config.form == "chat":
            return super().documents(tokenizer, rng, count, split)
        ids, starts = self._prose(tokenizer, split)
        length = min(self.config.length, len(ids) + 1)
        first = np.where(
            rng.random(count) < 0.25, starts[rng.integers(0, len(starts), count)], rng.integers(0, len(ids), count)
        )
        first = np.minimum(first, len(ids) - (length - 1))
        body = ids[first[:, None] + np.arange(length - 1)]
        bos = np.full((count, 1), tokenizer.token_to_id("<bos>"), dtype=np.int32)
        trained = np.ones((count, length), dtype=bool)
        trained[:, 0] = False
        return Documents(np.concatenate([bos, body], 1).reshape(-1), trained.reshape(-1), np.arange(count + 1) * length)

    def _prose(self, tokenizer: Tokenizer, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """All stories of ``split`` end to end, each closed by <eos>: ids [T] int32, and where each story starts."""
        if split not in self._tokens:
            stories: list[list[str]] = []
            for book in books(split):
                stories.append([])
                for paragraph in book:
                    if paragraph.startswith("## ") and stories[-1]:
                        stories.append([])
                    stories[-1].append(paragraph)
            coded = encode(tokenizer, [[(plain(story) + "<eos>", True)] for story in stories if story])
            self._tokens[split] = coded.ids, coded.bounds[:-1]
        return self._tokens[split]
