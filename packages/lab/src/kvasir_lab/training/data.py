"""Training batches: documents of every task, mixed by share of tokens and packed whole into rows.

Batch ``i`` is a pure function of the recipe's seed, ``i`` and the pools of ready documents, so a resumed run sees the
same data. Worker processes make the next batches while the device works.

Shape suffixes: B rows, T tokens a row.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.lookup import load_task
from kvasir_lab.task import Documents, Split, Task
from kvasir_lab.training.workers import ahead, all_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POOL_STREAM = 1 << 40  # Separates the random streams of the pools from those of the batches.
PIECE = 500  # Documents of a pool that one worker makes at a time.
MEASURED = 200  # Documents that estimate the mean length of a source's documents.
QUARTERS = 4  # Number of sizes that the targets of a part are rounded up to.
OWN = "own/"  # Prefix of documents made from the model's own replies; `Mixture.add` brings them.


@dataclass(frozen=True)
class Rows:
    """One part of every batch: ``count`` rows of ``length`` tokens; ``mix`` gives each task's share of their tokens.

    ``whole``: every document (long prose) fills exactly one row, so rows need no mask between documents.
    """

    count: int
    length: int
    mix: Mapping[str, float]
    whole: bool = False


@dataclass(slots=True)
class Batch:
    """Packed rows of tokens.

    ids [B, T] int32; documents [B, T] int16, numbered within a row; trained [B, T] bool; num_trained targets in all.
    chosen [M] int32: flat places of the trained tokens, then of others up to a whole quarter of all places, so that M
    has few sizes and training few graphs.
    """

    ids: np.ndarray
    documents: np.ndarray
    trained: np.ndarray
    chosen: np.ndarray
    num_trained: int
    num_tokens: int


def pack(documents: Documents, count: int, length: int) -> Batch:
    """Pack whole documents into ``count`` rows, longest first, each into the fullest row that still holds it.

    Documents longer than ``length`` are cut; those that find no room are left out. Padding counts as an untrained
    document.
    """
    ids = np.zeros((count, length), dtype=np.int32)
    number = np.full((count, length), -1, dtype=np.int16)
    trained = np.zeros((count, length), dtype=bool)
    lengths = np.minimum(documents.lengths, length)
    room: dict[int, list[int]] = {length: list(range(count - 1, -1, -1))}
    sizes = [length]  # sorted keys of ``room``
    placed = np.zeros(count, dtype=np.int16)
    for d in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[d])
        at = bisect.bisect_left(sizes, size)
        if at == len(sizes):
            continue
        space = sizes[at]
        row = room[space].pop()
        if not room[space]:
            del room[space], sizes[at]
        begin, source = length - space, documents.bounds[d]
        ids[row, begin : begin + size] = documents.ids[source : source + size]
        trained[row, begin : begin + size] = documents.trained[source : source + size]
        number[row, begin : begin + size] = placed[row]
        placed[row] += 1
        left = space - size
        if left not in room:
            room[left] = []
            bisect.insort(sizes, left)
        room[left].append(row)
    trained[:, 0] = False
    trained[:, 1:] &= number[:, 1:] == number[:, :-1]
    return Batch(ids, number, trained, targets(trained), int(trained.sum()), int((number >= 0).sum()))


def targets(trained: np.ndarray) -> np.ndarray:
    """Places to compute logits for: `Batch.chosen` of ``trained`` [B, T].

    No place occurs twice, because gradients add up there.
    """
    can = np.ones_like(trained)
    can[:, 0] = False
    first, rest = np.flatnonzero(trained & can), np.flatnonzero(~trained & can)
    quarter = max(1, trained.size // QUARTERS)
    wanted = max(1, -(-len(first) // quarter)) * quarter
    return np.concatenate([first, rest[: max(0, wanted - len(first))]]).astype(np.int32)


class Mixture:
    """The sources of a recipe with their pools of ready documents, and the batches drawn from them."""

    def __init__(
        self,
        rows: tuple[Rows, ...],
        tokenizer: Tokenizer,
        seed: int,
        *,
        later: Sequence[tuple[Rows, ...]] = (),
        split: Split = "train",
        pool: int | None = None,
        workers: int = 0,
    ) -> None:
        """``later``: the rows of each later phase. ``pool``: most ready documents of a source (for small runs).

        Raises ConfigError for an unknown task or form.
        """
        self.phases, self.tokenizer, self.seed, self.split = (rows, *later), tokenizer, seed, split
        parts = [part for phase in self.phases for part in phase]
        if any(not part.mix or min(part.mix.values()) <= 0 for part in parts):
            raise ConfigError("every part of a recipe needs tasks with positive shares")
        specs = dict.fromkeys(spec for part in parts for spec in part.mix if not spec.startswith(OWN))
        self.tasks: dict[str, Task] = {spec: load_task(spec) for spec in specs}
        self.pools: dict[str, Documents] = {}
        self.mean: dict[str, float] = {}
        sizes = {spec: min(task.pool, pool or task.pool) for spec, task in self.tasks.items()}
        pieces = [
            (spec, number, min(PIECE, size - number * PIECE))
            for spec, size in sizes.items()
            for number in range(-(-size // PIECE))
        ]
        made: dict[str, list[Documents]] = {spec: [] for spec in sizes}
        for (spec, _, _), documents in zip(pieces, all_of(self._piece, pieces, workers), strict=True):
            made[spec].append(documents)
        for spec, size in sizes.items():
            if size:
                self.add(spec, Documents.join(made[spec]))
            else:  # measures the mean length, and fills the task's own caches, which forked workers share
                self.mean[spec] = float(self._piece((spec, 0, min(MEASURED, pool or MEASURED))).lengths.mean())

    def _piece(self, piece: tuple[str, int, int]) -> Documents:
        """Make documents ``number`` * PIECE and on, ``count`` of them, of one source."""
        spec, number, count = piece
        key = [self.seed, POOL_STREAM, list(self.tasks).index(spec), number]
        return self.tasks[spec].documents(self.tokenizer, np.random.default_rng(key), count, self.split)

    def add(self, spec: str, documents: Documents) -> None:
        """Add a pool of ready documents under a name that the rows' mixes use. Raises ConfigError for an empty pool."""
        if not len(documents):
            raise ConfigError(f"there is no document for '{spec}'")
        self.pools[spec], self.mean[spec] = documents, float(documents.lengths.mean())

    def batch(self, number: int, phase: int = 0) -> list[Batch]:
        """Batch ``number``: one Batch for each part of the phase's rows."""
        return [
            self._part(part, np.random.default_rng([self.seed, number, i])) for i, part in enumerate(self.phases[phase])
        ]

    def _part(self, part: Rows, rng: np.random.Generator) -> Batch:
        total, tokens = sum(part.mix.values()), part.count * part.length
        drawn = []
        for spec, share in part.mix.items():
            if spec not in self.mean:
                continue  # no document could be made of these replies
            # Rounding is random, so that a small batch keeps the shares on average. Filling to 97 % lets all documents
            # fit.
            wanted = (1.0 if part.whole else 0.97) * tokens * share / total / self.mean[spec]
            count = int(wanted + rng.random())
            if not count:
                continue
            if spec in self.pools:
                pool = self.pools[spec]
                drawn.append(pool.take(rng.integers(0, len(pool), count)))
            else:
                drawn.append(self.tasks[spec].documents(self.tokenizer, rng, count, self.split))
        if not drawn:
            raise ConfigError(f"{part.count} rows of {part.length} tokens are too few for this mixture")
        return pack(Documents.join(drawn), part.count, part.length)

    def stream(self, start: int, workers: int, phase: int = 0) -> Iterator[list[Batch]]:
        """Batches ``start``, ``start`` + 1, ... in order, made ahead by ``workers`` processes (0: on demand)."""
        return ahead(partial(self.batch, phase=phase), start, workers)
