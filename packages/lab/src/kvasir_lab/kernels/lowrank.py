"""Check the kernels over low-rank keys and values, and time decodes at Llama 8B's heads with every build.

In bf16, 32 query heads, 8 KV heads of 128, ranks 512 + 512 and 256 + 256: single rows and drafts of 4 rows, with bytes
a second (each cached byte once) and FLOP a second (keys made, scores and sums), next to the kernel over plain pages for
the same contexts. Then the scratch of a prompt. About 2 minutes on an H100 with --skip-checks; 4 with checks.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse

import torch

from kvasir.kernels import lowrank_decode
from kvasir.kernels.decode_attention import Rows, decode_attention_triton
from kvasir.kernels.lowrank_decode import Latents, Shape, block_of, padded
from kvasir_lab.kernels.frame import ALL_TYPES, BF16, COLD_BYTES, Grid, Report, check_grids, graph_seconds, tried
from tests.kernels.check_lowrank import check_gather, check_rows

HEADS, GROUPS, DIM, PAGE = 32, 8, 128, 64
SCALE = DIM**-0.5
DECODES = {"8 x 2k": (8, 2048, 1), "16 x 32k": (16, 32768, 1), "drafts 16 x 8k": (16, 8192, 4)}
# keys of a block, elements of a latent in one product, warps, stages, programs at once, chunks of long work
SHAPES = {
    256: [(64, 128, 4, 2, 2, 4), (64, 64, 4, 3, 2, 4), (64, 64, 4, 2, 3, 4), (128, 256, 8, 1, 1, 4),
          (128, 128, 8, 2, 1, 4), (32, 64, 4, 3, 3, 4)],
    512: [(64, 64, 8, 3, 1, 4), (64, 64, 4, 3, 1, 4), (64, 64, 4, 2, 2, 4), (128, 64, 8, 2, 1, 4),
          (64, 128, 4, 2, 1, 4), (32, 64, 4, 3, 2, 4)],
}  # fmt: skip
GRIDS = {
    "rows": Grid(lambda: list(lowrank_decode.grid()), check_rows, ALL_TYPES),
    "gather": Grid(
        lambda: [case for case in lowrank_decode.grid() if case.window is None], check_gather, {torch.bfloat16: 1}
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def latents_of(pages: int, rank: int) -> Latents:
    """A cache of random latents, laid out as a pool lays out a layer, and random matrices."""
    plane = torch.randn(pages, 1, PAGE, rank, dtype=BF16, device="cuda")
    values = torch.randn(pages, 1, PAGE, rank, dtype=BF16, device="cuda")
    position = torch.randint(0, 32768, (pages, 1, PAGE, 1), dtype=torch.int32, device="cuda")
    angles = torch.outer(torch.arange(32768.0), 5e5 ** -(torch.arange(DIM // 2) * 2 / DIM))
    table = torch.cat((angles.cos(), angles.sin()), -1).cuda()
    k_up = torch.randn(GROUPS * DIM, rank, dtype=BF16, device="cuda") * rank**-0.5
    v_up = torch.randn(GROUPS, DIM, rank, dtype=BF16, device="cuda") * rank**-0.5
    return Latents(plane, values, position, k_up, v_up, table)


def decode_arms(report: Report, name: str, count: int, keys: int, most: int, rank: int) -> None:
    """Time every shape of the kernel for ``most`` rows of each of ``count`` sequences."""
    pages = count * keys // PAGE
    token_bytes = 4 * rank + 4
    caches = [latents_of(pages, rank) for _ in range(min(8, 1 + COLD_BYTES // (count * keys * token_bytes)))]
    table = torch.randperm(pages, device="cuda").int().view(count, -1).repeat_interleave(most, 0)
    rows = count * most
    q = torch.randn(rows, HEADS, DIM, dtype=BF16, device="cuda")
    out = torch.empty(rows, HEADS, rank, dtype=BF16, device="cuda")
    place = torch.arange(most, device="cuda").repeat(count)
    at, length = (keys - most + place).int(), torch.full((rows,), most, dtype=torch.int64, device="cuda")
    positions, bits = at.long(), None if most == 1 else ((2 << place) - 1)[:, None]
    block = block_of(most, HEADS // GROUPS)
    chosen = Shape.of(block, padded(rank), BF16)
    for shape in dict.fromkeys((chosen, *(Shape(block, *numbers) for numbers in SHAPES[rank]))):

        def run() -> None:
            for latents in caches:
                lowrank_decode.lowrank_rows_triton(
                    q, latents, table, at, place, length, most, SCALE, out, ancestors_TA=bits, positions_T=positions,
                    shape=shape,
                )  # fmt: skip

        found = tried((name, rank, shape), lambda: graph_seconds(run, 5))
        if found is not None:
            us = found / len(caches) * 1e6
            flops = 2 * count * keys * (rank * GROUPS * DIM + most * HEADS * (DIM + rank))
            rates = {
                "TB_per_s": round(count * keys * token_bytes / us / 1e6, 3),
                "TFLOP_per_s": round(flops / us / 1e6),
            }
            config = {"rank": rank, "rows": most, "shape": str(shape), "chosen": shape == chosen}
            report.add(f"decode {name}", config, {"us": round(us, 2)} | rates)


def plain_arm(report: Report, name: str, count: int, keys: int) -> None:
    """Time the kernel over plain pages of the same heads."""
    pages = count * keys // PAGE
    pool = torch.randn(pages, 2, GROUPS, PAGE, DIM, dtype=BF16, device="cuda")
    table = torch.randperm(pages, device="cuda").int().view(count, -1)
    q = torch.randn(count, HEADS, DIM, dtype=BF16, device="cuda")
    out, spans = torch.empty_like(q), torch.arange(count, dtype=torch.int32, device="cuda")
    rows = Rows(spans, torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"))
    context = torch.full((count,), keys - 1, dtype=torch.int32, device="cuda")
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")

    def run() -> None:
        decode_attention_triton(q, pool[:, 0], pool[:, 1], table, context, starts, rows, SCALE, out)

    found = tried((name, "plain"), lambda: graph_seconds(run, 5))
    if found is not None:
        rate = {"TB_per_s": round(count * keys * 4 * GROUPS * DIM / found / 1e12, 3)}
        report.add(f"decode {name}", {"codec": "plain"}, {"us": round(found * 1e6, 2)} | rate)


def gather_arm(report: Report, rank: int, keys: int = 32768) -> None:
    """Time the scratch of one prompt chunk: keys and values of all heads for ``keys`` positions."""
    latents = latents_of(keys // PAGE, rank)
    table = torch.randperm(keys // PAGE, device="cuda").int().view(1, -1)
    k, v = torch.empty(2, GROUPS, keys, DIM, dtype=BF16, device="cuda")
    spans = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    context = torch.tensor([keys - 64], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 64], dtype=torch.int32, device="cuda")

    def run() -> None:
        lowrank_decode.gather_lowrank_triton(latents, k, v, table, context, starts, spans, keys // 64, 64, 0)

    found = tried(("gather", rank), lambda: graph_seconds(run, 5))
    if found is not None:
        rate = round(4 * keys * rank * GROUPS * DIM / found / 1e12)
        report.add("gather 32k", {"rank": rank}, {"us": round(found * 1e6, 1), "TFLOP_per_s": rate})


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_lowrank", options.output)
    if not options.skip_checks:
        check_grids(report, __name__, GRIDS)
    for name, (count, keys, most) in DECODES.items():
        for rank in SHAPES:
            decode_arms(report, name, count, keys, most, rank)
        if most == 1:
            plain_arm(report, name, count, keys)
        report.save()
    for rank in SHAPES:
        gather_arm(report, rank)
    return report.end()
