"""Both ends of a decode in C: the inputs of rows, and their draws against the reference, which also says how certain
they must be."""

from itertools import product

import pytest
import torch

from kvasir.kernels.decode_rows import Kept, open_rows_reference
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import UNDRAWN, Decodes, Program
from kvasir.kernels.noise import gumbel_reference
from kvasir.kernels.sample import sample_rows_ref
from tests.kernels.sampling import KINDS, logits, parameters

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
CLOSE = 5e-5  # as in decode.h


def kept_of(given, num_groups=1, width=1, forgotten=None):
    temperature, top_k, top_p, min_p, stream, _ = given
    rows = len(temperature)
    return Kept(
        torch.zeros(rows, dtype=torch.int32),
        temperature.float(),
        top_k,
        top_p.float(),
        min_p.float(),
        stream.view(torch.int32).view(rows, 2),
        torch.zeros(num_groups, rows, width, dtype=torch.int32),
        forgotten,
    )


def draws(x, given, vocab_size):
    """Tokens of the rows, and those that are kept."""
    rows, kept, program = len(x), kept_of(given), Program(native().library)
    decodes = Decodes(rows, 1, 1, 16)
    program.draw(kept, decodes, x.float().contiguous(), vocab_size)
    decodes.set(list(range(rows)), given[5].tolist())
    decodes.want(0, rows)
    program.run(decodes)
    return torch.tensor(decodes.drawn(0, rows)), kept.token


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, vocab_size, width", [(300, 96, 96), (300, 61, 70), (60, 5000, 5056), (3, 70_001, 70_001)]
)
def test_draws_are_those_of_the_reference(kind, rows, vocab_size, width):
    draw = torch.Generator().manual_seed(vocab_size + len(kind))
    x, given = logits(kind, rows, width, draw), parameters(rows, vocab_size, draw)
    given = (*given[:2], given[2].float(), given[3].float(), *given[4:])
    want = sample_rows_ref(x, *given, vocab_size)[0].long()
    found, token = draws(x, given, vocab_size)
    left = found == UNDRAWN
    assert torch.equal(found[~left], want[~left]) and torch.equal(token[~left].long(), want[~left])
    if kind == "masked":
        assert left.all(), "infinities are for the host"
    else:
        assert left.sum() <= 1 + rows // 20
        moved = (*given[:5], given[5] + 1)  # other noise: the comparison can fail
        assert not torch.equal(draws(x, moved, vocab_size)[0], found) or kind == "peaked" or rows < 10


def test_only_what_rounding_might_change_is_left():
    """Two tokens whose scores differ by slightly more, or less, than CLOSE, by the reference's noise, whose error must
    be small compared with it."""
    rows = 20_000
    draw = torch.Generator().manual_seed(5)
    stream, position = (
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=draw),
        torch.randint(0, 1 << 20, (rows,), generator=draw),
    )
    noise = gumbel_reference(stream, position, 2).double()
    for apart, sure in ((1.3 * CLOSE, True), (0.7 * CLOSE, False)):
        x = torch.stack([torch.zeros(rows), (noise[:, 0] - noise[:, 1] + apart).float()], 1)
        near = x.abs().amax(1) < 8  # more has not the bits for it
        given = (
            torch.ones(rows),
            torch.full((rows,), 2, dtype=torch.int32),
            torch.ones(rows),
            torch.zeros(rows),
            stream,
            position,
        )
        found, _ = draws(x, given, 2)
        assert near.sum() > rows * 0.9 and (found[near] == (1 if sure else UNDRAWN)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 40, 60, 65])
def test_rows_that_are_wrong_are_left(bad, place):
    x = torch.randn(4, 70)
    x[1:3, place] = bad
    at = torch.arange(4)
    given = (
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.full((4,), 61, dtype=torch.int32),
        torch.ones(4),
        torch.zeros(4),
        at,
        at,
    )
    found, _ = draws(x, given, 61)
    assert ((found == UNDRAWN) == torch.tensor([False, True, True, False])).all()


@pytest.mark.parametrize("forgets", [False, True])
def test_what_rows_start_from(forgets):
    draw = torch.Generator().manual_seed(2)
    rows, groups, width, slots = 9, 2, 7, 16
    given = parameters(rows, 50, draw)
    forgotten = None
    if forgets:  # the rows of ``order`` have so many tokens before them
        forgotten = torch.randint(0, 900, (groups, rows), generator=draw, dtype=torch.int32)
        forgotten[:, 0], forgotten[:, 7] = 0, torch.tensor([15, 3])
        forgotten[:, 3], forgotten[:, 8] = torch.tensor([100, 1]), torch.tensor([0, 64])
    kept = kept_of(given, groups, width, forgotten)
    kept.token.random_(0, 50, generator=draw)
    kept.tables.random_(1, 900, generator=draw)
    order, starts = [7, 0, 3, 8], [15, 0, 111, 64]
    decodes, program = Decodes(rows, groups, width, slots), Program(native().library)
    program.open_rows(kept, decodes)
    decodes.set(order, starts)
    program.run(decodes)
    want = open_rows_reference(kept, torch.tensor(order), torch.tensor(starts), slots)
    assert torch.equal(decodes.ids[:4], want.ids) and torch.equal(want.context, torch.tensor(starts).int())
    places = want.places if forgets else want.context.expand(groups, -1)
    assert torch.equal(decodes.context[:, :4], places) and torch.equal(decodes.slots[:, :4], want.slots)
    assert not forgets or places.tolist() == [[0, 0, 11, 64], [12, 0, 110, 0]]
    for group, row in product(range(groups), range(4)):
        used = int(places[group, row]) // slots + 1
        assert torch.equal(decodes.tables[group, row, :used], want.tables[group, row, :used])
