"""Plans as tensors: the arguments that kernels are compiled for do not change with the number of rows."""

import pytest

from kvasir.engine.ways.batch import Packer
from kvasir.types import Request, SamplingParams, Sequence, Span

BYTES = 16  # to a Triton kernel, a pointer that is not a multiple of this is another type of argument


def span(number: int, start: int, length: int, tree: bool = False) -> Span:
    seq = Sequence(
        Request(
            id=str(number),
            prompt_ids=list(range(start + (1 if tree else length))),
            params=SamplingParams(),
            seed=0,
            max_tokens=9,
        )
    )
    seq.tables = [list(range(1, 9)), list(range(11, 19))]
    if not tree:
        return Span(seq, start, length, want={"sample": range(length - 1, length)})
    seq.draft = [1] * (length - 1)
    return Span(seq, start, length, {"sample": range(length)}, "walk", [-1, 0, 0, *range(1, length - 2)])


@pytest.mark.parametrize("lengths", [(1,), (3,), (1, 1, 1), (5, 1, 2), (1, 7, 4, 1, 6), (2,) * 9])
@pytest.mark.parametrize("tree", [False, True])
def test_every_section_is_aligned(lengths, tree):
    packer, spans = (
        Packer(16, 2, "cpu"),
        [span(i, 5 + i, length, tree and length > 2) for i, length in enumerate(lengths)],
    )
    for _ in range(2):  # one for each buffer
        batch = packer.pack(spans)
        assert batch.input_ids.tolist() == [token for s in spans for token in s.tokens()]
        assert batch.row_start.tolist()[-1] == sum(lengths) and batch.context.tolist() == [s.start for s in spans]
        assert batch.tables[1].shape == batch.tables[0].shape and batch.tables[1][:, 0].tolist() == [11] * len(spans)
        parts = [
            batch.input_ids,
            batch.positions,
            batch.row_start,
            batch.context,
            *batch.tables,
            *batch.slots,
            batch.logit_rows,
        ]
        for part in [*parts, *([batch.ancestors] if batch.ancestors is not None else [])]:
            assert part.is_contiguous() and part.data_ptr() % BYTES == 0
