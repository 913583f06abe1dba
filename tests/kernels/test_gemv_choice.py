"""The choice of products of few rows that do not go to the BLAS. Needs no Triton."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import gemv, hopper_gemv
from kvasir.kernels.gemv import Config, choose
from kvasir.kernels.hopper_gemv import choose_ring


def test_measured_shapes_take_what_was_measured(monkeypatch):
    fast = Config(16, 256, 1, 4)
    monkeypatch.setattr(gemv, "MEASURED", {(4, 96, 64): fast, (1, 96, 64): None})
    assert choose(3, 96, 64) == choose(4, 96, 64) == fast, "rows are rounded up to a measured step"
    assert choose(1, 96, 64) is None, "measured, and the BLAS won"
    assert choose(5, 96, 64) is None, "nobody measured that many rows"


@pytest.mark.parametrize("rows, width", [(0, 64), (17, 64), (1, 63)])
def test_what_the_kernels_do_not_take(rows, width):
    assert choose(rows, 96, width) is None


def test_one_row_of_an_unknown_shape_streams(monkeypatch):
    monkeypatch.setattr(gemv, "MEASURED", {})
    for width in (64, 1024, 14336):
        config = choose(1, 4096, width)
        assert config is not None and config.block_n < 16 and config.splits == 1


def test_every_measured_config_can_run():
    for (rows, _, width), config in gemv.MEASURED.items():
        assert rows in gemv.STEPS and width % 8 == 0
        assert config is None or config.block_n >= 16 or (rows == 1 and config.splits == 1)


def test_products_placed_by_hand(monkeypatch):
    w = torch.empty(4096, 1024, device="meta")
    assert choose_ring(64, w, False) is None, "runs on Hopper alone"
    monkeypatch.setattr(hopper_gemv, "by_hand", lambda device: True)
    assert (
        choose_ring(64, w, False)
        == choose_ring(hopper_gemv.MIN_ROWS, w, False)
        == hopper_gemv.MEASURED[4096, 1024, False]
    )
    assert choose_ring(hopper_gemv.MIN_ROWS - 1, w, False) is choose_ring(65, w, False) is None
    assert choose_ring(64, w, True) is None, "as gate and up it would not fit"
    assert choose_ring(64, torch.empty(4096, 1536, device="meta"), False) is None, "nobody measured it"


@pytest.mark.parametrize("num_rows, width, gated", hopper_gemv.MEASURED)
def test_products_placed_by_hand_fit(num_rows, width, gated):
    """The rings fit into the 227 KiB of shared memory that a program can have, with a KiB for barriers and for the
    result."""
    ring = hopper_gemv.MEASURED[num_rows, width, gated]
    blocks, left = divmod(width, ring.block_k * ring.splits)
    assert (
        not left and ring.block_n % 8 == 0 and min(ring.w_blocks, ring.x_blocks) > 1 and not (gated and ring.splits > 1)
    )
    held = min(ring.w_blocks, blocks) * (1 + gated) * ring.block_n + min(ring.x_blocks, blocks) * hopper_gemv.MAX_ROWS
    assert held * ring.block_k * 2 <= 226 << 10


def test_one_slot_is_refused():
    """It would wait for ever."""
    x, w = torch.empty(20, 512), torch.empty(64, 512)
    for ring in (hopper_gemv.Ring(w_blocks=1), hopper_gemv.Ring(x_blocks=1)):
        with pytest.raises(AssertionError, match="one slot"):
            hopper_gemv.stream_rows(x, w, ring)
