"""The rows of a step that token rounding may move between experts (``kernels.moe_rounding``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.types import StepBatch


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """``fixed_T`` [T] uint8: 1 for rows that keep their experts, which are all but those of prompts; None: no row does.
    ``prompt_rows``: the number of the others."""

    fixed_T: torch.Tensor | None
    prompt_rows: int


def rounded_rows(batch: StepBatch | None, num_rows: int, least: int) -> RoundedRows | None:
    """The rows of this step that may be rounded; None: the step is not, for its prompts have fewer than ``least`` rows
    (0: no step is), or ``num_rows`` are not all rows of the step. Layers share what is found in ``batch.scratch``."""
    if not least or batch is None or not batch.prompts or sum(batch.lengths) != num_rows:
        return None
    if RoundedRows not in batch.scratch:
        prompt_rows = sum(length for length, prompt in zip(batch.lengths, batch.prompts) if prompt)
        fixed_T = None
        if prompt_rows < num_rows:
            flags = torch.tensor([not prompt for prompt in batch.prompts], dtype=torch.uint8)
            fixed_T = flags.repeat_interleave(torch.tensor(batch.lengths)).to(batch.input_ids.device)
        batch.scratch[RoundedRows] = RoundedRows(fixed_T, prompt_rows)
    found: RoundedRows = batch.scratch[RoundedRows]
    return found if found.prompt_rows >= least else None
