"""Which bucket and form a decode step runs in, and when a bucket is worth a capture.

A step is padded to a *bucket* of rows. Its *form* says how the rows of one span share the keys they read: not at all
(``DECODES``), row by row (``ROW_BY_ROW``: each row is a decode of its own at the next position), or in tiles for spans
of at most so many rows (a larger form; ``AttentionBackend.together``).

A bucket that is not captured yet runs in a larger captured one, where there is one, until it has come often: a capture
takes longer than a few such steps gain. Otherwise it runs uncaptured a few times first (``EAGER_STEPS``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterator
from typing import NamedTuple

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.ways.capture import EAGER_STEPS
from kvasir.types import Span

DECODES, ROW_BY_ROW = 0, 1  # forms; a larger one is the most rows that a span may have
# Steps of an uncaptured bucket that run in a larger captured one before the bucket gets a capture of its own.
STAND_INS = 64
# The largest bucket that may stand in for another, as a multiple of that one's size. Padding rows are nearly free.
PADDED = 2
# Whether the rows of a span share the keys they read, where the backend can. Without sharing, chains run row by row,
# and trees and guests are launched kernel by kernel.
SHARE_KEYS = True
# Most rows of a drafted step that runs row by row. In a larger one, reading the keys once for each row costs more than
# launching the kernels one by one.
DRAFT_ROWS = 128
# Most rows of a drafted step whose rows share keys. A larger one takes the device longer than its launch takes the
# host.
SHARED_ROWS = 640


class GraphKey(NamedTuple):
    """A kind of step, for which a graph is captured. ``size``: rows of the bucket; ``output``: what the step puts
    out."""

    size: int
    output: StepOutput
    form: int


def buckets(max_rows: int) -> list[int]:
    """Sizes of buckets: 1, 2, 4, then multiples of 8 up to 256, of 32 beyond, and ``max_rows``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class Buckets:
    """Buckets and forms of one engine. ``forms`` are those for spans that share keys, ascending; empty where rows share
    none. ``max_drafts``: drafts that a sequence may have verified in a step."""

    def __init__(self, forms: tuple[int, ...], max_seqs: int, max_drafts: int) -> None:
        self.forms = forms if SHARE_KEYS and max_drafts > 0 else ()
        most = self.forms[-1] if self.forms else ROW_BY_ROW
        self.usual_form = next((form for form in self.forms if form > max_drafts), most)
        self.most_drafted = min(SHARED_ROWS if self.forms else DRAFT_ROWS, max_seqs * (1 + max_drafts))
        self.sizes = buckets(max(max_seqs, self.most_drafted))
        self.plain = self.sizes[: bisect_left(self.sizes, max_seqs) + 1]  # those that decodes alone may need
        drafts = max_drafts > 0
        self.drafted = [size for size in self.sizes if drafts and 1 < size <= self.most_drafted]
        self._uses: Counter[GraphKey] = Counter()  # uncaptured steps in a bucket of their own,
        self._stood_in: Counter[GraphKey] = Counter()  # and in a larger captured one

    def takes(self, spans: list[Span]) -> bool:
        """Whether these spans are decodes and drafts to verify (decodes alone, where no drafts are expected), and
        nothing else, and no more than the largest bucket holds."""
        rows = len(spans)
        for span in spans:  # once a sequence and step: no call that is not needed
            if span.want is ONE_SAMPLE:
                continue
            if len(span.want.get("sample", ())) + len(span.guests) != span.length:
                return False
            rows += span.length - 1
        if rows == len(spans):
            return rows <= self.sizes[-1]
        return bool(self.drafted) and rows <= self.most_drafted and self.form(spans) is not None

    def form(self, spans: list[Span]) -> int | None:
        """The form that these spans can run in; None: there is none."""
        longest = max(span.length for span in spans)
        if longest == 1:
            return DECODES
        if longest <= max(self.forms, default=0):
            return next(form for form in self.forms if longest <= form)
        chains = all(span.parents is None for span in spans) and sum(span.length for span in spans) <= DRAFT_ROWS
        return ROW_BY_ROW if chains else None

    def bucket(self, num_rows: int) -> int:
        """The smallest size that holds ``num_rows``."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def fit(self, key: GraphKey, captured: Container[GraphKey]) -> GraphKey:
        """The kind of step that one of kind ``key`` is run as now: its own, or a captured one somewhat larger, until
        ``key`` has come often."""
        size, output, form = key
        if key in captured or self._stood_in[key] >= STAND_INS:
            return key
        forms = [form, *(f for f in self.forms if 1 < form < f)]
        sizes = self.sizes[bisect_left(self.sizes, size) : bisect_right(self.sizes, PADDED * size)]
        larger = next((GraphKey(s, output, f) for s in sizes for f in forms if (s, output, f) in captured), None)
        if larger is None:
            return key
        self._stood_in[key] += 1
        return larger

    def is_due(self, key: GraphKey) -> bool:
        """Count an uncaptured use of this kind, and say whether it has come often enough to be captured."""
        self._uses[key] += 1
        return self._uses[key] > (1 if self._stood_in[key] >= STAND_INS else EAGER_STEPS)

    def by_worth(self, reports: bool) -> Iterator[GraphKey]:
        """Every kind of step in the order in which an idle engine captures them: first those that stand in for many
        others. ``reports``: whether steps that report are among them."""
        outputs = [StepOutput.DRAWS, *([StepOutput.REPORTS] if reports else [])]
        for form, sizes in ((DECODES, self.plain), (self.usual_form, self.drafted)):
            for output in outputs:
                # Powers of two stand in for all others.
                for size in sorted(sizes, key=lambda size: size & (size - 1) > 0):
                    yield GraphKey(size, output, form)

    @property
    def num_graphs(self) -> int:
        """Graphs that there can be in all."""
        drawing = len(self.sizes) + len(self.drafted) * max(1, len(self.forms))
        reporting = len(self.plain) + len(self.drafted)
        return drawing + reporting
