"""Both ends of a decode step against the torch calls they stand for: the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvasir.kernels import decode_rows


def kept_rows(count: int, tables: int, width: int, device: str, forgets: bool = False) -> decode_rows.Kept:
    draw = torch.Generator().manual_seed(count)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << 20, shape, generator=draw, dtype=torch.int32).to(device)

    floats = (torch.rand(count, generator=draw).to(device) for _ in range(3))
    temperature, top_p, min_p = floats
    many = ints(count), temperature, ints(count), top_p, min_p, ints(count, 2) - (1 << 19), ints(tables, count, width)
    return decode_rows.Kept(*many, ints(tables, count) % 16 if forgets else None)


@pytest.mark.parametrize("size, tables, width", [(1, 1, 7), (5, 2, 40), (3, 1, 1500)])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_rows_are_opened(size, tables, width, drafted, forgets, device):
    kept = kept_rows(9, tables, width, device, forgets)
    inbox = torch.zeros(3 * size + 1, dtype=torch.int64, device=device)[1:]  # slices of any alignment
    inbox[:size] = torch.tensor([8, 2, 2, 0, 8][:size])
    inbox[size : 2 * size] = torch.tensor([16, 37, 38, 16 * width - 1, 15][:size]) % (16 * width)
    inbox[2 * size :] = torch.tensor([-1, -1, 77, -1, 5][:size])
    arguments = kept, inbox[:size], inbox[size : 2 * size], 16, inbox[2 * size :] if drafted else None
    found, want = decode_rows.open_rows(*arguments), decode_rows.open_rows_reference(*arguments)
    for field in dataclasses.fields(want):
        a, b = getattr(found, field.name), getattr(want, field.name)
        assert a is b is None or a.dtype == b.dtype and torch.equal(a, b), field.name
    assert (found.places is not None) == forgets


@pytest.mark.parametrize("size", [1, 300])
def test_rows_are_closed(size, device):
    draws = torch.randint(-3, 1000, (3, size), generator=torch.Generator().manual_seed(1)).float().to(device)
    rows = torch.randperm(400, generator=torch.Generator().manual_seed(2))[:size].to(device)
    outcome = []
    for close in (decode_rows.close_rows, decode_rows.close_rows_reference):
        token, out = torch.full((400,), -7, dtype=torch.int32, device=device), torch.zeros(3, 500, device=device)
        close(draws, out[:, 20 : 20 + size], token, rows, 900)
        outcome.append((token, out))
    assert all(torch.equal(a, b) for a, b in zip(*outcome)) and int(outcome[0][0].max()) == min(
        899, int(draws[0].max())
    )
