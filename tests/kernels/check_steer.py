"""The kernels of hooks against their references, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvasir.kernels import steer
from kvasir.kernels.steer import Case, Gates, Steers

# Largest error against the reference, as a share of the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# A row's open gates, and the bit of the hook that is tested.
OPEN, BIT = 0b0110, 0b0100


def draw_steers(case: Case, device: str, seed: int = 0) -> Steers:
    """Random parameters with unit directions; the base's place, which no row may read, is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    slots = len(case.modes) + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(slots, *shape, generator=generator).to(device)

    vectors = normal(case.count, case.heads, case.width)
    vectors /= vectors.norm(dim=-1, keepdim=True)
    biases, numbers = normal(case.count, case.heads) * 0.1, normal(2)
    vectors[0] = torch.nan
    words = torch.zeros(slots, 3, dtype=torch.int32)
    words[1:, 0], words[1:, 1] = torch.tensor(case.modes), BIT
    words[1:, 2] = torch.tensor([max(1, case.count - i % 2) for i in range(len(case.modes))])
    heads = torch.ones(slots, case.heads, dtype=torch.int32)
    heads[1, case.heads // 2 :] = case.heads == 1  # some heads of the first set stay
    shifts = any(mode & steer.SHIFT for mode in case.modes)
    return Steers(vectors, biases, numbers, words.to(device), heads.to(device), shifts)


def draw(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, what their moves are added to, and words of the rows; every third row's gate is closed."""
    generator = torch.Generator().manual_seed(1)
    x, out = (torch.randn(len(case.slots), case.heads, case.width, generator=generator) for _ in range(2))
    words = [slot << steer.SLOT_SHIFT | (OPEN if i % 3 != 2 else OPEN ^ BIT) for i, slot in enumerate(case.slots)]
    return (
        x.to(device, dtype),
        out.to(device, dtype),
        torch.tensor([word if word >> steer.SLOT_SHIFT else 0 for word in words], dtype=torch.int32, device=device),
    )


def check_steer(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The error of the kernel against the reference. Closed rows and heads that were not chosen keep their bits."""
    steers, (x, out, words) = draw_steers(case, device), draw(case, dtype, device)
    got, want = ((x.clone(), out.clone() if case.adds else None) for _ in range(2))
    steer.steer(got[0], words, steers, got[1])
    steer.steer_reference(want[0], words, steers, want[1])
    found, wanted, before = (got[1], want[1], out) if case.adds else (got[0], want[0], x)
    error = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    assert error <= TOLERANCE[dtype], f"{case}: {error}"
    closed = (words & BIT) == 0
    assert torch.equal(found[closed], before[closed]), "a closed row has changed"
    still = ~closed[:, None] & (steers.heads_SH[(words >> steer.SLOT_SHIFT).long()] == 0)
    assert torch.equal(found[still], before[still]), "a head that was not chosen has changed"
    if case.adds:
        assert torch.equal(got[0], x), "the states of added moves stay"
    return {"error": error}


def check_row_bits(case: Case, dtype: torch.dtype, device: str) -> None:
    """A row alone has the bits that it has in any batch, by the kernel; by the reference on a CPU, where it serves."""
    for kernel in (steer.steer, steer.steer_reference)[: 2 if device == "cpu" else 1]:
        _check_row_bits(kernel, case, dtype, device)


def _check_row_bits(kernel: Callable, case: Case, dtype: torch.dtype, device: str) -> None:
    steers, (x, out, words) = draw_steers(case, device), draw(case, dtype, device)
    together = x.clone(), out.clone()
    kernel(together[0], words, steers, together[1] if case.adds else None)
    for row in range(len(x)):
        one, sums = x[row : row + 1].clone(), out[row : row + 1].clone()
        kernel(one, words[row : row + 1], steers, sums if case.adds else None)
        assert torch.equal(one[0], together[0][row]) and torch.equal(sums[0], together[1][row]), row


def check_gates(device: str) -> None:
    """Bits of every mixture of sets, tokens and positions."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 256, (4, 50), generator=generator).to(torch.uint8)
    tokens[0] = 0
    windows = torch.randint(0, 30, (4, steer.MAX_HOOKS, 2), generator=generator).int()
    gates = Gates(tokens.to(device), windows.to(device))
    count = 700
    slot, adapter = (torch.randint(0, 4, (count,), generator=generator) for _ in range(2))
    ids, positions = (torch.randint(0, most, (count,), generator=generator) for most in (50, 30))
    variants = (slot << steer.ADAPTER_BITS | adapter).int()
    inputs = variants.to(device), ids.to(device), positions.to(device)
    found, wanted = steer.gate_rows(*inputs, gates), steer.gate_rows_reference(*inputs, gates)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert found[0].tolist() == adapter.tolist()
    for i in range(0, count, 7):
        bits = 0
        for j in range(steer.MAX_HOOKS):
            first, end = windows[slot[i], j].tolist()
            bits |= (int(tokens[slot[i], ids[i]]) >> j & 1 & (first <= int(positions[i]) < end)) << j
        assert int(found[1][i]) == (int(slot[i]) << steer.SLOT_SHIFT | bits if bits else 0)
