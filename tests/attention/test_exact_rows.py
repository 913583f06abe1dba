"""The contract of exact mode: a row's bits are a function of its sequence and position, of nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvasir.attention.backend import AttentionSpec
from kvasir.attention.exact_rows import BLOCK, SIZES, TILE, WINDOW_BLOCK, Blocks, Exact
from tests.attention.helpers import make_world
from tests.attention.test_torch_backend import attention

LENGTH, HEADS, GROUPS, DIM = 100, 6, 2, 40
KINDS = {"plain": {}, "window": {"window": 50}, "all": {"window": 70, "softcap": 5.0, "sinks": True}}


class Text:
    """One sequence's q, k, v; its rows are then computed in every possible company."""

    def __init__(self, kind: dict, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(11)
        self.kind, self.dtype = {**kind, "heads": HEADS, "kv_heads": GROUPS, "dim": DIM, "dtype": dtype}, dtype
        self.q = torch.randn(LENGTH, HEADS, DIM, generator=draw).to(dtype)
        self.kv = torch.randn(2, LENGTH, GROUPS, DIM, generator=draw).to(dtype)

    def rows(
        self, start: int, length: int, before: tuple = (), after: tuple = (), **how
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of rows start .. start + length, computed together with other spans."""
        place = len(before)
        content = {place: (self.q[start : start + length], self.kv[:, : start + length])}
        world = make_world([*before, (start, length), *after], content=content, **{**self.kind, **how})
        if world.sinks is not None:
            world.sinks = torch.linspace(-1, 1, HEADS)
        out, lse = attention(world, exact=True, lse=True)
        first = sum(n for _, n in before)
        return out[first : first + length], lse[first : first + length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_chunks_pages_or_company(kind, dtype):
    text = Text(KINDS[kind], dtype)
    want = text.rows(0, LENGTH)

    def check(got: tuple[torch.Tensor, torch.Tensor], start: int, what: str) -> None:
        for x, y in zip(got, want):
            assert torch.equal(x, y[start : start + len(x)]), what

    for chunk, step in ((1, 5), (7, 7), (64, 64)):
        for start in range(0, LENGTH, step):
            check(text.rows(start, min(chunk, LENGTH - start), seed=start), start, f"chunks of {chunk}")
    for size in (1, 16, 128):
        check(text.rows(33, 60, page_slots=size), 33, f"pages of {size} slots")
    for others in (1, 31):
        company = tuple((i, 1 + i % 3) for i in range(others))
        for start, length in ((99, 1), (64, 1), (63, 2), (20, 9)):
            check(text.rows(start, length, before=company, after=company[:1]), start, f"{others} others")


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_of_a_tree_has_the_bits_of_plain_decoding(kind):
    """Tree rows 0, 2, 3, 5 are a chain of the true tokens; the rest are wrong guesses."""
    text, start, path = Text(KINDS[kind], torch.float32), 90, [0, 2, 3, 5]
    parents = [-1, 0, 0, 2, 2, 3, 3]
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(7, HEADS, DIM, generator=draw)
    kv = torch.randn(2, start + 7, GROUPS, DIM, generator=draw)
    kv[:, :start] = text.kv[:, :start]
    for depth, row in enumerate(path):
        q[row], kv[:, start + row] = text.q[start + depth], text.kv[:, start + depth]
    world = make_world([(5, 2), (start, 7)], trees={1: parents}, content={1: (q, kv)}, **text.kind)
    world.sinks = None if world.sinks is None else torch.linspace(-1, 1, HEADS)
    got, want = attention(world, exact=True)[2:][path], text.rows(start, 4)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_place_in_a_tile_or_on_blocks_that_a_row_does_not_see(threads):
    """Rows beyond one block of keys, at every place of a tile, alone and in one span."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw, last = torch.Generator().manual_seed(5), BLOCK + 40
        q = torch.randn(1, 2 * last, 64, generator=draw)
        k, v = torch.randn(1, last, 64, generator=draw), torch.randn(1, last, 48, generator=draw)
        for window in (None, 30, WINDOW_BLOCK + 7):
            exact = Exact.of(AttentionSpec(2, 1, 64, 0.1, window, 20.0))
            whole = exact.rows(q, 1, Blocks.of(k, v, 0, exact.block))
            edges = [size + i for size in (*SIZES, 2 * WINDOW_BLOCK, BLOCK) for i in (-2, -1, 0, 1)]
            for row in [*range(2 * TILE), *edges, *range(last - TILE, last)]:
                first = 0 if window is None else max(0, row + 1 - window) // 16 * 16  # pages before may be gone
                own = Blocks.of(k[:, first : row + 1], v[:, first : row + 1], first, exact.block)
                alone = exact.rows(q[:, 2 * row : 2 * row + 2], row + 1, own)
                for x, y in zip(alone, whole):
                    assert torch.equal(x, y[:, 2 * row : 2 * row + 2]), f"row {row}, window {window}"
    finally:
        torch.set_num_threads(before)


class Called(TorchDispatchMode):
    """Counts calls of torch."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_decode_makes_few_calls():
    """A short decode costs what its calls cost: as many for 8 KV heads as for 2, and for 4,000 keys as for 64."""

    def calls(context: int, kv_heads: int) -> int:
        world = make_world([(context - 1, 1)], heads=2 * kv_heads, kv_heads=kv_heads, dim=16, dtype=torch.float32)
        with Called() as counted:
            attention(world, exact=True)
        return counted.calls

    few = calls(60, 2)
    assert few < 70
    assert calls(60, 8) == few
    assert calls(4000, 2) <= few + 8  # exp is called for parts


class Copied(TorchDispatchMode):
    """Counts the elements that copies write."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.elements += out.numel()
        return out


def test_a_long_prompt_copies_its_keys_once():
    """No row copies the keys that it sees: what is copied grows with the rows, not with their square."""

    def copied(length: int) -> int:
        world = make_world([(0, length)], heads=4, kv_heads=2, dim=16, dtype=torch.float32)
        with Copied() as counted:
            attention(world, exact=True)
        return counted.elements

    assert copied(600) < 3 * copied(300)
