"""The digest of weights: the same for the same content, another for any other bit, place, shape or type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvasir.layers.weights import Slot
from kvasir.models import digest as digest_module
from kvasir.models.digest import digest


def decoder(*tensors: torch.Tensor):
    slots = {f"w{i}": Slot(t) for i, t in enumerate(tensors)}
    return SimpleNamespace(slots=lambda: slots)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(digest_module, "CHUNK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("count", [1, 7, 8, 64, 1001])
def test_equal_content_is_equal_wherever_it_lies(dtype, count):
    data = (torch.arange(3 * count) % 100).to(dtype).view(count, 3)
    known = digest(decoder(data))
    assert len(known) == 32 and digest(decoder(data.clone())) == known
    fused = torch.zeros(count + 2, 3, dtype=dtype)  # a slice of a fused weight, at an odd place
    fused[1 : count + 1] = data
    assert digest(decoder(fused[1 : count + 1])) == known
    assert digest(decoder(data.mT.contiguous().mT)) == known


def test_any_change_shows():
    data = torch.arange(1000, dtype=torch.float32).view(10, 100)
    seen = {digest(decoder(data)), digest(decoder(data.view(100, 10))), digest(decoder(data.view(torch.int32)))}
    for place in (0, 1, 499, 998, 999):
        changed = data.clone()
        changed.view(torch.int32).view(-1)[place] ^= 1
        seen.add(digest(decoder(changed)))
    swapped = data.clone()
    swapped[0], swapped[1] = data[1], data[0]
    seen |= {digest(decoder(swapped)), digest(decoder(data, data)), digest(decoder(torch.zeros_like(data)))}
    assert len(seen) == 3 + 5 + 3


def test_a_digest_without_places_would_miss_a_swap(monkeypatch):
    """Negative control: a plain sum is blind to order."""
    monkeypatch.setattr(digest_module, "STRIDE", 0)
    with pytest.raises(AssertionError):
        test_any_change_shows()
