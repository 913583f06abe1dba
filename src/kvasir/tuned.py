"""The table of tuned numbers: what each means, what it was measured on, and how to measure it again.

A number belongs here when another machine or another workload would want another value. Code reads its tuned numbers
from here. A table of shapes is a list of rows, each with conditions and a shape; the first row whose conditions hold
gives the shape (``look_up``). ``docs/tuning.md`` shows the table (``python -m tests.tuning`` writes it), and
``tests/test_tuning.py`` checks that every source, command and reader exists.

Not here: limits of hardware (the rows of a tensor core), and the tile of ``kernels.matmul``, which must be the same on
every machine.
"""

from __future__ import annotations

from kvasir.tuned_entry import H200, Tuned, look_up, unmeasured

__all__ = ["look_up"]

SIMULATED = "simulated, with step times of an NVIDIA H200"
XEON = "Intel Xeon with AVX-512, 2 cores"

ATTENTION = "python -m kvasir_lab.kernels attention RESULT.json"
DECODE = "python -m kvasir_lab.kernels decode RESULT.json"
FUSED = "python -m kvasir_lab.kernels fused RESULT.json"
CODES = "python -m kvasir_lab.kernels kv RESULT.json"
EXPERTS = "python -m kvasir_lab.kernels moe RESULT.json --sweep"
SERVING = "python -m kvasir_lab.studies simulate_serving RESULT.json"
CODE_TILES = "python -m kvasir_lab.kernels codes RESULT.json --quick"
NATIVE = "python -m kvasir_lab.kernels native RESULT.json"
LATENTS = ("NVIDIA H100", ("h100/gpu_latents.json",), "python -m kvasir_lab.kernels latents RESULT.json")
CODED_EXPERTS = ("NVIDIA H100", ("h100/gpu_codes-experts.json",), CODE_TILES)

MIXED_STEP = Tuned(
    12.5,
    "Longest step in which prompts may join decodes, in times of reading all weights, where no target is set.",
    ("kvasir.engine.schedule.pace.MIXED_STEP",),
    SIMULATED,
    ("cpu/simulate-serving-first.json", "h200/trace-conversation-18.json"),
    SERVING,
)
SHORT_STEP = Tuned(
    7.0,
    "Length of a short step, in times of reading all weights.",
    ("kvasir.engine.schedule.pace.SHORT_STEP",),
    SIMULATED,
    ("cpu/simulate-serving.json", "cpu/simulate-bounds.json", "h200/traces-full.json"),
    SERVING,
)
SHORT_STEPS = Tuned(
    3,
    "Most short steps that may be spent on the queued prompts; where it takes more, steps are of full length.",
    ("kvasir.engine.schedule.pace.SHORT_STEPS",),
    SIMULATED,
    ("cpu/simulate-serving.json", "h200/traces-full.json"),
    SERVING,
)
SEVERAL_DECODES = Tuned(
    range(12, 40),
    "Decodes in a step for which short steps pay. With fewer, the prompts matter more; with more, too "
    "many steps are long for short ones to lower the p99.",
    ("kvasir.engine.schedule.pace.SEVERAL_DECODES",),
    SIMULATED,
    ("cpu/simulate-serving.json", "h200/traces-full.json"),
    SERVING,
)

# ---------------------------------------------------------------------------------------------------- decode attention

DECODE_ATTENTION = Tuned(
    (
        ({"dtype": "float32", "dim": 64, "rows": 16}, (32, 8, 2, 6, 3)),
        ({"dtype": "float32", "dim": 64}, (32, 8, 2, 12, 3)),
        ({"dtype": "float32", "dim": 256, "rows": 16}, (16, 8, 2, 6, 3)),
        ({"dtype": "float32", "dim": 256}, (16, 8, 2, 12, 3)),
        ({"dtype": "float32"}, (16, 8, 2, 4, 1)),
        ({"dim": 128, "rows": 16}, (64, 2, 3, 6, 3)),
        ({"dim": 128, "rows": 31}, (64, 2, 3, 12, 3)),
        ({"dim": 128, "uneven": True}, (32, 2, 4, 12, 4)),
        ({"dim": 128}, (64, 2, 2, 12, 4)),
        ({"dim": 256, "rows": 16}, (32, 4, 3, 6, 3)),
        ({"dim": 256}, (32, 4, 3, 12, 3)),
        ({}, (32, 8, 2, 4, 1)),
    ),
    "Shape of the kernel for single rows: keys of a block, warps, pipeline stages, chunks of long work for each "
    "multiprocessor, and programs that fit on one at once. Heads of 512 have what shared memory and registers hold; "
    "nobody measured them.",
    ("kvasir.kernels.decode_attention.Shape",),
    H200,
    ("h200/gpu_attention.json", "h200/gpu_decode.json", "h200/gpu_by-hand.json", "h200/gpu_by-hand-2.json"),
    DECODE,
)
MIN_CHUNK = Tuned(
    128,
    "Least keys of a chunk of a single row; fewer are not worth a program of their own and a merge.",
    ("kvasir.kernels.key_chunks.MIN_CHUNK",),
    H200,
    ("h200/gpu_decode.json",),
    DECODE,
)
SHORT_CHUNK = unmeasured(
    1024,
    "Longest chunk, in keys, for which all chunks of a launch run at once.",
    ("kvasir.kernels.key_chunks.SHORT_CHUNK",),
    DECODE,
)
QUANTIZED_DECODE = Tuned(
    (
        ({"dtype": "float32"}, (32, 8, 2, 12, 3)),
        ({"rows": 2, "words": 32, "share": 8}, (64, 1, 3, 6, 4)),
        ({"rows": 2, "words": 64, "share": 8}, (128, 4, 3, 4, 2)),
        ({"rows": 2}, (64, 4, 3, 6, 2)),
        ({"words": 32, "share": 8}, (64, 1, 4, 16, 8)),
        ({"words": 64, "share": 8}, (32, 1, 4, 14, 7)),
        ({}, (32, 2, 3, 8, 4)),
    ),
    "Shape of the kernel for single rows over codes, as in DECODE_ATTENTION. words: 16-bit words of a head's codes.",
    ("kvasir.kernels.quantized_decode.shape_of",),
    H200,
    ("h200/gpu_kv.json",),
    CODES,
)

# ---------------------------------------------------------------------------------------------- attention of more rows

PAGED_ATTENTION = Tuned(
    (
        ({"dtype": "float32", "dim": 64}, (32, 8, 2)),
        ({"dtype": "float32"}, (16, 8, 2)),
        ({"dim": 128, "block_m": 127}, (64, 4, 3)),
        ({"dim": 128}, (64, 8, 3)),
        ({"dim": 256, "block_m": 32}, (32, 4, 3)),
        ({"dim": 256, "block_m": 127}, (32, 4, 2)),
        ({}, (32, 8, 2)),
    ),
    "Shape of the kernel for any span: keys of a block, warps and pipeline stages. block_m: rows x heads of a tile. "
    "Heads of 512 have what shared memory and registers hold; nobody measured them.",
    ("kvasir.kernels.paged_attention._blocks",),
    H200,
    ("h200/gpu_kernels.json", "h200/gpu_attention.json"),
    ATTENTION,
)
LATENT_ATTENTION = Tuned(
    (
        ({"dtype": "float32", "rank": 64}, (32, 4, 2, 2, 4)),
        ({"dtype": "float32"}, (16, 8, 2, 1, 4)),
        ({"rank": 128}, (64, 4, 3, 2, 4)),
        ({"rank": 256, "block_m": 32}, (64, 4, 3, 2, 4)),
        ({"rank": 256}, (64, 8, 3, 1, 2)),
        ({"block_m": 16}, (32, 4, 3, 2, 4)),
        ({"block_m": 32}, (32, 4, 3, 2, 4)),
        ({}, (64, 8, 2, 1, 2)),
    ),
    "Shape of the kernel over latents: keys of a block, warps, pipeline stages, programs that fit on a multiprocessor "
    "at once, and chunks of long work for each. block_m: rows x heads of a tile; rank: of the latent. Rank 512 "
    "was measured; the other rows are what shared memory and registers of Hopper hold.",
    ("kvasir.kernels.latent_decode.Shape",),
    *LATENTS,
)
LOWRANK_ATTENTION = Tuned(
    (({"dtype": "float32"}, (16, 32, 8, 1, 1, 4)), ({"rank": 256}, (64, 64, 4, 3, 2, 4)), ({}, (128, 64, 8, 2, 1, 4))),
    "Shape of the kernel over low-rank caches: keys of a block, elements of a latent of keys in one product, then as "
    "for latents. rank: the larger of both. 256 and 512 were measured.",
    ("kvasir.kernels.lowrank_decode.Shape",),
    "NVIDIA H100",
    ("h100/gpu_lowrank.json",),
    "python -m kvasir_lab.kernels lowrank RESULT.json",
)
LATENT_PROMPT = Tuned(
    (({"dim": 192}, (128, 64, 8, 3)), ({"dim": 320}, (128, 64, 8, 2)), ({}, (64, 32, 4, 2))),
    "Shape of the kernel for prompts over keys and values made of latents: rows of a tile, keys of a block, warps and "
    "pipeline stages. dim: padded elements of a head's key. 192 was measured; the others are what shared memory of "
    "Hopper holds.",
    ("kvasir.kernels.latent_prompt.Shape",),
    *LATENTS,
)
LATENT_CROSSING = Tuned(
    1.0,
    "Rows of a span from which on keys and values are made of the latents, as a multiple of the rows at which both "
    "forms take as many operations. Timed at 8,192 keys, both take as long at 1.0 with 16 heads of 128 + 128 elements, "
    "and at 0.6 with 20 heads of 192 + 256.",
    ("kvasir.kernels.latent_prompt.CROSSING",),
    *LATENTS,
)
SPLIT_KEYS = unmeasured(
    256,
    "Least keys of a split of a tile; fewer are not worth a program of their own.",
    ("kvasir.kernels.paged_attention.SPLIT_KEYS",),
    ATTENTION,
)
DRAFT_TILES = Tuned(
    (({"block_m": 16}, (2, 4)), ({}, (1, 2))),
    "Tiles of drafts in a captured step: programs that fit on a multiprocessor at once, and chunks of long work for "
    "each. Large tiles leave large partial results.",
    ("kvasir.kernels.paged_attention.TogetherShape",),
    H200,
    ("h200/gpu_kv.json", "h200/gpu_verify.json"),
    "python -m kvasir_lab.kernels kv_drafts RESULT.json",
)
QUANTIZED_ROWS = Tuned(
    (
        ({"dtype": "float32", "dim": 64}, (32, 8, 2, 2)),
        ({"dtype": "float32"}, (16, 8, 2, 2)),
        ({"block_m": 16, "dim": 128}, (32, 1, 3, 8)),
        ({"format": "int4"}, (64, 4, 3, 2)),
        ({}, (32, 4, 3, 2)),
    ),
    "Shape of the kernel for short spans over codes: keys of a block, warps, pipeline stages, and programs that fit "
    "on a multiprocessor at once.",
    ("kvasir.kernels.quantized_attention.Shape",),
    H200,
    ("h200/gpu_kv.json",),
    CODES,
)
QUANTIZED_COLUMNS = Tuned(
    128,
    "Most rows x query heads of a KV head that read codes directly; for more, the codes are decoded once into scratch.",
    ("kvasir.kernels.quantized_attention.MAX_COLUMNS",),
    H200,
    ("h200/gpu_kv.json",),
    CODES,
)
DENSE_ATTENTION = Tuned(
    (({"dim": 128}, (64, 64, 4, 3)), ({}, (128, 64, 8, 2))),
    "Shape of the kernel for long spans: rows x heads of a tile, keys of a block, warps and pipeline stages.",
    ("kvasir.kernels.dense_attention.Shape",),
    H200,
    ("h200/gpu_attention.json",),
    ATTENTION,
)
DENSE_ROWS = Tuned(
    1024,
    "Least rows x query heads of a KV head for which a span's keys are copied into dense scratch.",
    ("kvasir.kernels.dense_attention.MIN_ROWS",),
    H200,
    ("h200/gpu_attention.json",),
    ATTENTION,
)
HOPPER_ATTENTION = Tuned(
    (128, 128, 2),
    "Shape of the warp-specialised kernel for long spans: rows x heads of a tile, keys of a block, slots of a ring.",
    ("kvasir.kernels.hopper_attention.HopperShape",),
    H200,
    ("h200/gpu_prefill.json", "h200/gpu_prefill-variants.json", "h200/gpu_prefill-persistent.json"),
    "python -m kvasir_lab.kernels prefill RESULT.json",
)

# ------------------------------------------------------------------------------------------------- writes of the cache

QUANTIZED_WRITE_ROWS = Tuned(
    16,
    "Most rows of a step for which the write to a quantised cache takes its small programs.",
    ("kvasir.kernels.quantized_qkv.FEW",),
    H200,
    ("h200/gpu_kv-write.json",),
    "python -m kvasir_lab.kernels kv_write RESULT.json",
)
QUANTIZED_WRITE = Tuned(
    (
        ({"rotation": "none", "few": True}, (4, 1)),
        ({"rotation": "none"}, (16, 4)),
        ({"rotation": "whole"}, (16, 4)),
        ({"rotation": "blocks", "few": True}, (4, 1)),
        ({"rotation": "blocks"}, (8, 1)),
    ),
    "Shape of the write to a quantised cache: heads of a program (at least; more fill a tensor core's rows) and warps.",
    ("kvasir.kernels.quantized_qkv.Shape",),
    H200,
    ("h200/gpu_kv-write.json",),
    "python -m kvasir_lab.kernels kv_write RESULT.json",
)

# ------------------------------------------------------------------------------------------------------------ products

MOE_TILINGS = Tuned(
    (
        ({"dtype": "float32"}, ((16, 32, 32, 4, 2), (16, 32, 32, 4, 2))),
        ({"pairs": 8}, ((16, 32, 128, 4, 4), (16, 64, 128, 4, 4))),
        ({"pairs": 24}, ((32, 32, 128, 4, 4), (32, 64, 128, 4, 4))),
        ({"pairs": 96}, ((64, 64, 64, 4, 4), (64, 128, 64, 4, 4))),
        ({}, ((128, 128, 64, 8, 3), (128, 128, 64, 8, 3))),
    ),
    "Tiles of the two products of a mixture of experts (gate and up; down): pairs, outputs, inputs of a block, warps "
    "and pipeline stages. pairs: (row, expert) pairs an expert has on average.",
    ("kvasir.kernels.moe.TILINGS",),
    H200,
    ("h200/gpu_moe.json",),
    EXPERTS,
)
GEMV = Tuned(
    {
        # (rows up to, N, K): outputs of a program, inputs of a block, warps, stages, splits of K.
        (1, 6144, 4096): (8, 256, 4, 1, 1), (2, 6144, 4096): (64, 256, 4, 3, 1), (4, 6144, 4096): (64, 256, 4, 3, 1),
        (8, 6144, 4096): (64, 256, 4, 3, 1), (16, 6144, 4096): (64, 256, 4, 3, 1), (32, 6144, 4096): (64, 64, 4, 4, 4),
        (64, 6144, 4096): None,
        (1, 4096, 4096): (8, 512, 8, 1, 1), (2, 4096, 4096): (64, 128, 4, 4, 4), (4, 4096, 4096): (64, 128, 4, 4, 4),
        (8, 4096, 4096): (64, 128, 4, 4, 4), (16, 4096, 4096): (64, 128, 4, 4, 4), (32, 4096, 4096): (64, 128, 4, 3, 4),
        (64, 4096, 4096): None,
        (1, 28672, 4096): (64, 256, 4, 3, 1), (2, 28672, 4096): None, (4, 28672, 4096): None, (8, 28672, 4096): None,
        (16, 28672, 4096): (64, 256, 4, 3, 1), (32, 28672, 4096): (128, 128, 8, 3, 1),
        (64, 28672, 4096): (128, 64, 4, 4, 1),
        (1, 4096, 14336): (8, 512, 8, 1, 1), (2, 4096, 14336): (64, 128, 4, 4, 4), (4, 4096, 14336): (64, 128, 4, 4, 4),
        (8, 4096, 14336): (64, 128, 4, 4, 4), (16, 4096, 14336): (64, 128, 4, 4, 4),
        (32, 4096, 14336): (64, 128, 4, 3, 4), (64, 4096, 14336): (64, 64, 4, 4, 4),
        (1, 128256, 4096): (8, 256, 4, 1, 1), (2, 128256, 4096): None, (4, 128256, 4096): None, (8, 128256, 4096): None,
        (16, 128256, 4096): None, (32, 128256, 4096): (128, 64, 4, 4, 1), (64, 128256, 4096): (128, 64, 4, 4, 1),
        (1, 4096, 1024): (8, 512, 4, 1, 1), (2, 4096, 1024): (64, 128, 4, 4, 4), (4, 4096, 1024): (64, 128, 4, 4, 4),
        (8, 4096, 1024): (64, 128, 4, 4, 4), (16, 4096, 1024): (64, 128, 4, 4, 4), (32, 4096, 1024): (64, 128, 4, 3, 4),
        (64, 4096, 1024): None,
        (1, 1024, 2048): (2, 2048, 4, 1, 1), (2, 1024, 2048): (16, 256, 1, 4, 4), (4, 1024, 2048): (32, 128, 4, 4, 4),
        (8, 1024, 2048): (64, 128, 4, 3, 8), (16, 1024, 2048): (64, 128, 4, 3, 8), (32, 1024, 2048): (64, 128, 4, 3, 4),
        (64, 1024, 2048): (64, 128, 4, 3, 8),
        (1, 6144, 1024): (8, 256, 4, 1, 1), (2, 6144, 1024): (64, 256, 4, 3, 1), (4, 6144, 1024): (64, 256, 4, 3, 1),
        (8, 6144, 1024): (64, 256, 4, 3, 1), (16, 6144, 1024): (64, 256, 4, 3, 1), (32, 6144, 1024): (64, 64, 4, 4, 4),
        (64, 6144, 1024): None,
        (1, 1024, 3072): (4, 1024, 8, 1, 1), (2, 1024, 3072): (16, 256, 1, 4, 4), (4, 1024, 3072): (64, 128, 4, 4, 4),
        (8, 1024, 3072): (64, 128, 4, 3, 8), (16, 1024, 3072): (64, 128, 4, 3, 8), (32, 1024, 3072): (64, 128, 4, 3, 4),
        (64, 1024, 3072): (64, 128, 4, 3, 8),
        (1, 151936, 1024): (8, 256, 4, 1, 1), (2, 151936, 1024): (128, 64, 8, 4, 1),
        (4, 151936, 1024): (128, 64, 8, 4, 1), (8, 151936, 1024): (128, 64, 8, 4, 1),
        (16, 151936, 1024): (128, 64, 8, 4, 1), (32, 151936, 1024): None, (64, 151936, 1024): None,
    },
    "Products of a few rows with Llama-8B's and Qwen3-0.6B's matrices [N, K], norm and activation included where the "
    "models have them: the fastest shape, none where cuBLAS is faster. Three shapes of 16 rows were "
    "fastest in whole steps.",
    ("kvasir.kernels.gemv.MEASURED",),
    H200,
    ("h200/gpu_fused.json", "h200/gpu_fused-rows-32-64.json", "h200/gpu_decode.json"),
    FUSED,
)  # fmt: skip
GEMV_ONE_ROW = unmeasured(
    (({"width": 1023}, (4, 256, 2)), ({}, (4, 1024, 4))),
    "Products of one row with a matrix that nobody measured: outputs of a program, inputs of a block, warps.",
    ("kvasir.kernels.gemv._unmeasured",),
    FUSED,
)
F8_GEMV = Tuned(
    (
        ({"coded": True, "rows": 64, "gated": True}, (128, 256, 8, 3, 100)),
        ({"coded": True, "rows": 32}, (64, 256, 4, 5, 192)),
        ({"coded": True, "rows": 64}, (64, 256, 4, 5, 96)),
        ({"coded": True, "gated": True}, (128, 128, 8, 3, 100)),
        ({"coded": True}, (128, 256, 8, 3, 96)),
        ({"rows": 1, "gated": True}, (8, 512, 8, 1, 1)),
        ({"rows": 1}, (8, 1024, 4, 1, 1)),
        ({"rows": 16, "gated": True}, (64, 256, 4, 3, 200)),
        ({"rows": 16}, (64, 256, 4, 5, 256)),
        ({"rows": 32, "gated": True}, (128, 128, 8, 5, 100)),
        ({"rows": 32}, (64, 256, 4, 3, 192)),
        ({"rows": 64}, (128, 128, 8, 5, 96)),
        ({}, (64, 128, 8, 3, 96)),
    ),
    "Products of a few rows with FP8 codes: outputs of a program, inputs of a block, warps, stages, and programs for "
    "which K is split. coded: whether the rows are codes as well. Measured at 1 to 64 rows of Llama-8B's matrices; of "
    "more no result is kept.",
    ("kvasir.kernels.f8_gemv.choose",),
    "NVIDIA H200",
    ("h200/gpu_f8-words.json",),
    "python -m kvasir_lab.kernels f8 RESULT.json --skip-checks --skip-prompts",
)
F8_ROWS = Tuned(
    (16, 64),
    "With FP8 activations: rows of a product up to which they are read as they are where weights have a scale a "
    "channel, and up to which the kernel for few rows multiplies them; beyond, the library does.",
    ("kvasir.layers.formats.f8.ROWS_AS_THEY_ARE", "kvasir.layers.formats.f8.CODED_ROWS"),
    "NVIDIA H200",
    ("h200/gpu_f8-words.json",),
    "python -m kvasir_lab.kernels f8 RESULT.json --skip-checks",
)
CODES_GEMV = Tuned(
    (
        ({"rows": 1, "gated": True}, (8, 512, 4, 1, 1)),
        ({"rows": 1}, (8, 1024, 4, 1, 1)),
        ({"rows": 16, "gated": True}, (32, 128, 2, 4, 896)),
        ({"rows": 16}, (64, 128, 4, 4, 384)),
        ({"gated": True}, (64, 128, 4, 3, 132)),
        ({}, (64, 128, 4, 3, 256)),
    ),
    "Products of a few rows with other codes: outputs of a program, inputs of a block, warps, stages, and programs for "
    "which K is split. Fewer than 16 outputs: the kernel without tensor cores. Measured for 4, 6 and 8 bits.",
    ("kvasir.kernels.codes_gemv.choose",),
    "NVIDIA H100",
    ("h100/gpu_codes-few.json", "h100/gpu_codes-fp6.json"),
    CODE_TILES,
)
NIBBLE_GEMV = Tuned(
    (
        ({"rows": 8, "gated": True, "layout": "u4"}, (64, 128, 4, 3, 400)),
        ({"rows": 8, "gated": True, "layout": "nvfp4"}, (64, 256, 4, 3, 512)),
        ({"rows": 8, "gated": True}, (64, 128, 4, 3, 512)),
        ({"rows": 8}, (64, 128, 4, 3, 512)),
        ({"rows": 16, "gated": True}, (128, 128, 4, 3, 200)),
        ({"rows": 16}, (64, 128, 4, 5, 512)),
        ({"rows": 32, "gated": True}, (64, 128, 4, 3, 200)),
        ({}, (64, 128, 4, 3, 512)),
    ),
    "Products of the rows in NIBBLE_ROWS with codes of four bits: outputs of a program, inputs of a block (of ``u4`` a "
    "group), warps, stages, and programs for which K is split. CODES_GEMV has the others.",
    ("kvasir.kernels.nibble_gemv.choose",),
    "NVIDIA H200",
    ("h200/gpu_codes-words.json",),
    CODE_TILES,
)
NIBBLE_ROWS = Tuned(
    (8, 32),
    "Most rows of a product that the kernel for words of four bits multiplies: without and with zero points. Beyond, "
    "the other kernel is quicker, or nobody measured both.",
    ("kvasir.kernels.nibble_gemv.choose",),
    "NVIDIA H200",
    ("h200/gpu_codes-words.json",),
    CODE_TILES,
)
FUSED_NORM_ROWS = unmeasured(
    16,
    "Most rows for which a product with codes of bytes applies the norm itself. Every program does so for its share of "
    "the inputs; with more rows that takes longer than a kernel of its own. Nobody measured it alone.",
    ("kvasir.layers.products.FUSED_NORM_ROWS",),
    CODE_TILES,
    "NVIDIA H100",
)
CODES_MOE = Tuned(
    (
        ({"pairs": 8}, ((16, 32, 128, 2, 4), (16, 32, 128, 2, 4))),
        ({"pairs": 24}, ((32, 64, 128, 4, 3), (32, 64, 128, 4, 4))),
        ({}, ((64, 64, 128, 4, 3), (64, 64, 128, 4, 3))),
    ),
    "MOE_TILINGS for experts of codes in 16 bits: codes become numbers once for each tile of pairs. Measured up to 8 "
    "pairs of an expert.",
    ("kvasir.kernels.moe.CODE_TILINGS",),
    *CODED_EXPERTS,
)
CODES_ROW = Tuned(
    (({"gated": True}, (8, 4, 256)), ({}, (4, 4, 512))),
    "Experts of codes for a single row: outputs and warps of a program, and bytes of an output in flight.",
    ("kvasir.kernels.codes_moe.row_shape",),
    *CODED_EXPERTS,
)
STREAMED_PAIRS = Tuned(
    64,
    "Pairs of an expert up to which its codes are multiplied as they are; beyond, a copy in the model's type is used.",
    ("kvasir.layers.codes.STREAMED_PAIRS",),
    "NVIDIA H100",
    ("h100/gpu_codes-mxfp4.json",),
    "python -m kvasir_lab.kernels codes RESULT.json --skip-checks --skip-few",
)
HOPPER_GEMV_ROWS = Tuned(
    17,
    "Least rows for which products take the kernel with copies placed by hand; for fewer, GEMV's kernels are as fast.",
    ("kvasir.kernels.hopper_gemv.MIN_ROWS",),
    H200,
    ("h200/gpu_by-hand.json",),
    f"{DECODE} --parts steps",
)
HOPPER_GEMV = Tuned(
    {
        # (N, K, whether N is gate and up): outputs of a program, inputs of a block, blocks of W and of x at a time,
        # splits of K.
        (4096, 1024, False): (32, 256, 4, 4, 1),
        (6144, 1024, True): (32, 256, 4, 3, 1),
        (1024, 2048, False): (32, 256, 2, 2, 4),
        (1024, 3072, False): (32, 256, 3, 3, 4),
        (4096, 2048, False): (64, 256, 4, 3, 1),
        (12288, 2048, True): (64, 128, 4, 4, 1),
        (2048, 2048, False): (32, 256, 4, 4, 2),
    },
    "Products of 17 to 64 rows with Qwen3-0.6B's and Qwen3-1.7B's matrices (without the latter's down projection): the "
    "shape that was fastest in whole steps.",
    ("kvasir.kernels.hopper_gemv.MEASURED",),
    H200,
    ("h200/gpu_by-hand.json", "h200/gpu_by-hand-2.json"),
    f"{DECODE} --parts steps",
)

# ---------------------------------------------------------------------------------------------------------------- CPUs

PACKED_ROWS = Tuned(
    32,
    "Most rows for which a CPU product reads its weights as fp16; with 64 rows MKL in fp32 is faster.",
    ("kvasir.kernels.packed_fp16.MAX_ROWS",),
    XEON,
    (),
    "",
)
PACKED_WEIGHTS = Tuned(
    1 << 18,
    "Least elements of a weight that is worth an fp16 copy on a CPU; the call costs more than smaller ones gain.",
    ("kvasir.kernels.packed_fp16.MIN_NUMEL",),
    XEON,
    (),
    "",
)
MATRIX_TILE_ROWS = Tuned(
    8,
    "Least rows for which the C kernels use the processor's matrix tiles (AMX), where it has them.",
    ("kvasir.kernels.native.program.TILES_FROM",),
    XEON,
    (),
    NATIVE,
)

TABLE: dict[str, Tuned] = {name: value for name, value in list(globals().items()) if isinstance(value, Tuned)}
