"""Time products of a CPU with codes of 8 and 4 bits, with fp32 inputs and with inputs rounded to 8 bits.

``python -m kvasir_lab.studies rounded_inputs [RESULT.json]``: a minute. Gigabytes of codes a second, at 1, 4 and 16
rows; matrices of an 8B model in turn, so that none is in a cache.
"""

from __future__ import annotations

import time
from itertools import product

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import Program, StepInputs
from kvasir.kernels.native.quantized import pack_codes
from kvasir_lab.study import Arms, Report, study

OUTPUTS, INPUTS, MATRICES, GROUP = 4096, 4096, 24, 32
ROWS = 1, 4, 16
ROUNDS = 5  # the best one counts


def steps_of(rows: int) -> StepInputs:
    """A step of so many rows, which a program of products alone takes."""
    at, none = torch.arange(rows), torch.zeros(rows, dtype=torch.int32)
    start = torch.arange(rows + 1, dtype=torch.int32)
    return StepInputs(at, at, start, none, [none[:, None].contiguous()], [at], at[:0])


def measure(bits: int, rounded: bool, rows: int) -> float:
    """Gigabytes of codes and scales a second."""
    program, library = Program(native().library), native().library
    dtype, high = (torch.int8, 127) if bits == 8 else (torch.uint8, 16)
    codes = torch.randint(-high if bits == 8 else 0, high, (OUTPUTS, INPUTS)).to(dtype)
    x, y = torch.randn(rows, INPUTS), torch.empty(rows, OUTPUTS)
    total = 0
    for _ in range(MATRICES):
        packed = pack_codes(library, codes, torch.rand(OUTPUTS, INPUTS // GROUP), rounded=rounded)
        program.linear(x, packed, y)
        total += packed.data.nbytes
    times, step = [], steps_of(rows)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        program.run(step)
        times.append(time.perf_counter() - begin)
    return total / min(times) / 1e9


@study("rounded-inputs")
def main(report: Report) -> Arms:
    if native().library is None:
        raise ConfigError(f"no native kernels: {native().reason}")
    for bits, rows, rounded in product((8, 4), ROWS, (False, True)):
        config = {
            "bits": bits,
            "rows": rows,
            "inputs": "int8" if rounded else "fp32",
            "threads": torch.get_num_threads(),
        }
        speed = round(measure(bits, rounded, rows), 2)
        yield f"{bits} bits, {config['inputs']} inputs, {rows} rows", config, {"gigabytes_per_second": speed}
