"""Default texts of a calibration: the shipped books and problems with their solutions, half each, seed 42."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvasir.convert.calibrate import NUM_TEXTS, TEXT_TOKENS, Texts, cut_texts
from kvasir.models.tokenizer import Tokenizer
from kvasir_lab.lookup import load_task
from kvasir_lab.tasks import story

SEED = 42
TASKS = ("template", "chain", "path", "needle")
# Characters of a book that hold one text's tokens, and problems of a task that fill its texts.
PASSAGE, PROBLEMS = 12 * TEXT_TOKENS, 600


def default_texts(model: Path) -> Texts:
    """Texts in the tokens of ``model``, of training splits only. Texts of books and of problems take turns."""
    tokenizer, rng = Tokenizer.load(model), np.random.default_rng(SEED)
    books = [story.plain(book) for book in story.books("train")]
    count = (NUM_TEXTS + NUM_TEXTS // 8) // 2
    problems = [iter(load_task(name).problems("train", SEED, PROBLEMS)) for name in TASKS]
    ids: list[int] = []
    for turn in range(count):
        book, text = books[rng.integers(len(books))], []
        start = int(rng.integers(max(1, len(book) - PASSAGE)))
        ids += tokenizer.encode(book[start : start + PASSAGE])[:TEXT_TOKENS]  # with <bos>, as in training
        while len(text) < TEXT_TOKENS:
            problem = next(problems[turn % len(problems)])
            document = "".join(part for part, _ in problem.segments())
            text += tokenizer.encode(document, add_special=False, parse_special=True)
        ids += text[:TEXT_TOKENS]
    return cut_texts(ids, "the default texts")
