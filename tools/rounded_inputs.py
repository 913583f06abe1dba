"""Time products of a CPU with codes of 8 and 4 bits, with fp32 inputs and with inputs rounded to 8 bits.

``python -m tools.rounded_inputs [RESULT.json]``: a minute. Gigabytes of codes a second, at 1, 4 and 16 rows; matrices
of an 8B model in turn, so that none is in a cache.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import Program, StepInputs
from kvasir.kernels.native.quantized import pack_codes

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


def main() -> None:
    if native().library is None:
        sys.exit(f"no native kernels: {native().reason}")
    found = {
        f"{bits} bits, {'int8' if rounded else 'fp32'} inputs, {rows} rows": round(measure(bits, rounded, rows), 2)
        for bits in (8, 4)
        for rows in ROWS
        for rounded in (False, True)
    }
    print("\n".join(f"{what}: {speed} GB/s" for what, speed in found.items()))
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"threads": torch.get_num_threads(), "gigabytes a second": found}, file, indent=1)


if __name__ == "__main__":
    main()
