"""Check the kernels over latents on their grids, and time the ways to build each, and the crossing of prompts.

In bf16 at 512 + 64: decodes at 16, 20, 32 and 128 heads (bytes a second, and FLOP a second), drafts, the write; then
spans of rising length after a context, absorbed and expanded, so that the crossing is read off ("crossing"). Quantised
latents beside plain ones. About 6 minutes on an H200, most of it compiling; with --skip-checks about 3.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
from typing import Any

import torch

from kvasir.attention.latent import UpProjection
from kvasir.kernels import latent_decode, latent_prompt, latent_rows
from kvasir.kernels.dense_attention import Shape as DenseShape
from kvasir.kernels.latent_decode import Planes, Shape, block_of, padded
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow
from kvasir_lab.kernels.frame import (
    ALL_TYPES,
    BF16,
    COLD_BYTES,
    Grid,
    Report,
    check_grids,
    graph_seconds,
    measure_limits,
    tried,
)
from tests.kernels.check_latents import check_codes, check_prompts, check_rows, check_tiles, check_write

RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5
DECODES = {"8 x 1k": (8, 1024), "64 x 1k": (64, 1024), "64 x 8k": (64, 8192), "16 x 32k": (16, 32768)}
# block_m: (keys of a block, warps, stages, programs at once, chunks of long work)
SHAPES: dict[int, list[tuple[int, int, int, int, int]]] = {
    16: [(32, 4, 3, 2, 4), (32, 4, 4, 1, 4), (32, 8, 3, 2, 4), (64, 4, 2, 1, 4), (64, 8, 2, 1, 2), (16, 4, 4, 2, 4)],
    32: [(32, 8, 3, 2, 4), (32, 4, 3, 2, 4), (32, 8, 4, 1, 2), (64, 8, 2, 1, 2), (16, 8, 4, 2, 4)],
    64: [(32, 8, 3, 1, 2), (32, 8, 4, 1, 2), (64, 8, 2, 1, 2), (32, 4, 3, 1, 2), (64, 4, 2, 1, 2)],
}
LENGTHS = (32, 64, 128, 171, 256, 512, 1024)  # rows of a span after CONTEXT positions
CONTEXT = 8192
# Shapes of the kernel for prompts.
PROMPTS = [
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
]
WIDTHS = {"deepseek": (16, 128, 128), "glm": (20, 192, 256)}  # heads, other elements of a key, of a value

WIDE_TYPES = {torch.bfloat16: 1, torch.float16: 1}
GRIDS = {
    "tiles": Grid(lambda: list(latent_decode.grid()), check_tiles, ALL_TYPES),
    "rows": Grid(lambda: list(latent_decode.grid()), check_rows, ALL_TYPES),
    "write": Grid(lambda: list(latent_rows.grid()), check_write, ALL_TYPES),
    "codes": Grid(
        lambda: [(format, rank, rope) for format in ("int8", "fp8") for rank, rope in ((512, 64), (320, 32), (96, 0))],
        lambda case, dtype, device: check_codes(*case, device),
        {torch.float32: 1},
    ),
    "prompts": Grid(lambda: list(latent_prompt.grid()), check_prompts, WIDE_TYPES),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def pool_of(count: int, keys: int, codec: str = "plain") -> tuple[KVPool, torch.Tensor, int]:
    """Pages for ``count`` sequences of ``keys`` positions, their table, and as many layers as keep the L2 cache from
    holding them."""
    loaded = load(CODECS, codec, Codec)
    size = loaded.page_slots
    row = CacheRow(1, RANK + ROPE, 0, latent=RANK)
    pages = count * -(-keys // size)
    layers = min(32, 1 + COLD_BYTES // (count * keys * (RANK + ROPE)))
    pool = KVPool([CacheGroup("g", tuple(range(layers)), (row,) * layers)], loaded, [pages], size, "cuda", BF16)
    rows = torch.randn(size, RANK + ROPE, dtype=BF16, device="cuda")
    for layer in range(layers):  # one page of numbers, copied to all
        cache = pool.layer(layer)
        planes = Planes.of(cache.planes, RANK, loaded.kernel)
        latent_rows.latent_rows(
            torch.zeros(size, 1, ROPE, dtype=BF16, device="cuda"), rows, planes, torch.arange(size, device="cuda"),
            None, None,
        )  # fmt: skip
        for plane in cache.planes.values():
            plane[1:] = plane[:1]
    table = torch.randperm(pages, device="cuda").int().view(count, -1)
    return pool, table, layers


def decode_arms(report: Report, name: str, count: int, keys: int, heads: int, codec: str, most: int = 1) -> None:
    """Time every shape of the kernel for ``most`` rows of each of ``count`` sequences."""
    pool, table, layers = pool_of(count, keys, codec)
    rows = count * most
    q = torch.randn(rows, heads, RANK + ROPE, dtype=BF16, device="cuda")
    out = torch.empty(rows, heads, RANK, dtype=BF16, device="cuda")
    place = torch.arange(most, device="cuda").repeat(count)
    at = (keys - most + place).int()
    length = torch.full((rows,), most, dtype=torch.int64, device="cuda")
    tables = table.repeat_interleave(most, 0)
    bits = None if most == 1 else ((2 << place) - 1)[:, None]
    block = block_of(most, heads, BF16)
    chosen = Shape.of(block, padded(RANK), BF16)
    shapes = [chosen, *(Shape(block, *numbers) for numbers in SHAPES.get(block, []))]
    if most == 1 and block < 64:  # rows of a tensor core that 64 rows x heads fill
        shapes += [Shape(64, *numbers) for numbers in SHAPES[64]]
    token_bytes = pool.page_bytes(0) / pool.page_slots / layers
    for shape in dict.fromkeys(shapes):

        def run() -> None:
            for layer in range(layers):
                planes = Planes.of(pool.layer(layer).planes, RANK, pool.codec.kernel)
                latent_decode.latent_rows_triton(
                    q, planes, tables, at, place, length, most, SCALE, out, ancestors_TA=bits, shape=shape
                )

        found = tried((name, heads, codec, shape), lambda: graph_seconds(run, 5))
        if found is not None:
            us = found / layers * 1e6
            flops = 2 * rows * keys * heads * (2 * RANK + ROPE)
            config = {"heads": heads, "codec": codec, "rows": most, "shape": str(shape), "chosen": shape == chosen}
            rates = {
                "TB_per_s": round(count * keys * token_bytes / us / 1e6, 3),
                "TFLOP_per_s": round(flops / us / 1e6),
            }
            report.add(f"decode {name}", config, {"us": round(us, 2)} | rates)


def crossing_arms(report: Report, name: str, heads: int, nope: int, value: int) -> None:
    """Time a span of every length after a context, absorbed with its products and expanded."""
    pool, table, _ = pool_of(1, CONTEXT + max(LENGTHS))
    planes = Planes.of(pool.layer(0).planes, RANK, "plain")

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device="cuda") * shape[-1] ** -0.5

    up = UpProjection(random(heads, nope, RANK), random(heads, value, RANK))
    first = None
    for rows in (*LENGTHS, 4096) if name == "deepseek" else LENGTHS:
        start = CONTEXT if rows <= max(LENGTHS) else 0
        q, out = random(rows, heads, nope + ROPE), random(rows, heads, value)
        ends = torch.tensor([start], dtype=torch.int32, device="cuda"), torch.tensor([0, rows], device="cuda").int()
        tiles = latent_decode.plan_latent_tiles([start], [rows], heads, BF16, "cuda", [0])
        long = latent_prompt.plan_prompts([start], [rows], [0], nope, ROPE, "cuda")

        def absorbed() -> None:
            x = torch.empty(rows, heads, RANK, dtype=BF16, device="cuda")
            latent_decode.latent_tiles_triton(up.absorb(q), planes, table, *ends, tiles, SCALE, x)
            up.project(x, out)

        def expanded() -> None:
            latent_prompt.latent_prompt_triton(q, planes, up.key_HDR, up.value_HVR, table, *ends, long, SCALE, out)

        us: dict[str, Any] = {}
        for way, run in (("absorbed", absorbed), ("expanded", expanded)):
            spent = tried((name, rows, way), lambda: graph_seconds(run, 5))
            us[f"{way}_us"] = None if spent is None else round(spent * 1e6, 1)
        pairs = rows * start + rows * rows // 2
        if us["expanded_us"]:
            us["expanded_TFLOP_per_s"] = round(2 * pairs * heads * (nope + ROPE + value) / us["expanded_us"] / 1e6)
        if rows == 4096:
            for numbers in PROMPTS:
                long = latent_prompt.plan_prompts([start], [rows], [0], nope, ROPE, "cuda", DenseShape(*numbers))
                spent = tried((name, numbers), lambda: graph_seconds(expanded, 5))
                us[f"expanded_us {numbers}"] = None if spent is None else round(spent * 1e6, 1)
        report.add(f"prompt {name}", {"rows": rows, "context": start, "heads": heads}, us)
        if first is None and us["absorbed_us"] and us["expanded_us"] and us["expanded_us"] < us["absorbed_us"]:
            first = rows
    report.add(f"crossing {name}", {"by_operations": latent_prompt.crossing(RANK, nope, value)}, {"timed": first or 0})


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_latents", options.output)
    if not options.skip_checks:
        check_grids(report, __name__, GRIDS)
    measure_limits(report)
    for name, (count, keys) in DECODES.items():
        for heads in (16, 20, 32, 128):
            if heads in (16, 32) or name == "64 x 8k":
                decode_arms(report, name, count, keys, heads, "plain")
        report.save()
    for codec in ("int8", "fp8"):
        decode_arms(report, "64 x 8k", 64, 8192, 16, codec)
    for most in (4, 16):
        decode_arms(report, "drafts 16 x 8k", 16, 8192, 16, "plain", most)
    report.save()
    for name, (heads, nope, value) in WIDTHS.items():
        crossing_arms(report, name, heads, nope, value)
    return report.end()
