"""The kernels over latents on their grids: attention of tiles and of rows, and the write."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import latent_decode, latent_prompt, latent_rows
from tests.kernels.check_latents import check_codes, check_prompts, check_rows, check_tiles, check_write

CASES = list(enumerate(latent_decode.grid()))


@pytest.mark.parametrize("place, case", CASES, ids=str)
def test_tiles(place, case, device):
    for dtype in (torch.float32, torch.float16):
        if device == "cuda" or dtype == (torch.float32, torch.float16)[place % 3 == 1]:
            check_tiles(case, dtype, device)


@pytest.mark.parametrize("place, case", CASES, ids=str)
def test_rows_known_on_the_device_alone(place, case, device):
    for dtype in (torch.float32, torch.float16):
        if device == "cuda" or dtype == (torch.float32, torch.float16)[place % 3 == 2]:
            check_rows(case, dtype, device)


@pytest.mark.parametrize("case", list(latent_rows.grid()), ids=str)
def test_write(case, device):
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        check_write(case, dtype, device)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("rank, rope", [(512, 64), (320, 32), (96, 0), (32, 16)])
def test_write_of_codes(format, rank, rope, device):
    check_codes(format, rank, rope, device)


@pytest.mark.parametrize("case", list(latent_prompt.grid()), ids=str)
def test_prompts(case, device):
    check_prompts(case, torch.bfloat16 if device == "cuda" else torch.float16, device)
