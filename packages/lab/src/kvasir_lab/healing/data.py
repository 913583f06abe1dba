"""Texts of a healing: crops of the shipped books and of problems with their solutions, or of a file.

A batch depends on seed and step alone, so that a resumed run reads what it would have read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.models.tokenizer import Tokenizer
from kvasir.plain_files import refuse_special
from kvasir_lab.calibration import TASKS
from kvasir_lab.lookup import load_task
from kvasir_lab.tasks import story

TEXT_TOKENS = 256  # as in a calibration
PROBLEMS = 2000  # of each task, in the order of the seed
HELD_OUT = 8  # texts whose loss is shown


@dataclass(frozen=True)
class Corpus:
    """Streams of token ids that take turns in a batch, and texts that are only measured [N, TEXT_TOKENS]."""

    streams: list[np.ndarray]
    held_out: torch.Tensor

    def batch(self, rows: int, seed: int, step: int, length: int = TEXT_TOKENS) -> torch.Tensor:
        """Token ids [rows, length] of the step."""
        rng = np.random.default_rng((seed, step))
        found = []
        for row in range(rows):
            ids = self.streams[row % len(self.streams)]
            start = int(rng.integers(len(ids) - length + 1))
            found.append(ids[start : start + length])
        return torch.from_numpy(np.stack(found).astype(np.int64))


def default_corpus(model: Path, seed: int, problems: int = PROBLEMS) -> Corpus:
    """The training books, and problems of the lab's tasks with their solutions, in the tokens of ``model``. Held out
    are the validation splits of both."""
    tokenizer = Tokenizer.load(model)

    def tokens(split: str, count: int) -> list[np.ndarray]:
        prose = [i for book in story.books(split) for i in tokenizer.encode(story.plain(book), add_special=False)]
        solved: list[int] = []
        drawn = [iter(load_task(name).problems(split, seed, count)) for name in TASKS]
        for _ in range(count):
            for problems in drawn:
                text = "".join(part for part, _ in next(problems).segments())
                solved += tokenizer.encode(text, add_special=False, parse_special=True)
        return [np.asarray(prose, np.int32), np.asarray(solved, np.int32)]

    held = Corpus(tokens("validation", max(8, problems // 20)), torch.empty(0))
    return Corpus(tokens("train", problems), held.batch(HELD_OUT, seed, 0))


def file_corpus(file: Path, model: Path) -> Corpus:
    """The tokens of a UTF-8 file; the last tenth is held out. Raises ConfigError."""
    refuse_special(file)
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--texts {file}: {e}") from e
    return cut(np.asarray(Tokenizer.load(model).encode(content, add_special=False), np.int32), f"--texts {file}")


def cut(ids: np.ndarray, where: str) -> Corpus:
    """One stream of ``ids``, whose last tenth is held out. Raises ConfigError for fewer than 20 texts."""
    if len(ids) < 20 * TEXT_TOKENS:
        raise ConfigError(f"{where} holds {len(ids)} tokens; healing needs at least {20 * TEXT_TOKENS}")
    first = len(ids) * 9 // 10
    return Corpus([ids[:first]], Corpus([ids[first:]], torch.empty(0)).batch(HELD_OUT, 0, 0))
