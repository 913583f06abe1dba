"""The stop rules: where a sequence ends among the tokens that a step has drawn for it."""

from __future__ import annotations

from collections.abc import Container

from kvasir.types import FinishReason, Sequence


def until_stop(
    seq: Sequence, sampled: list[int], eos_ids: Container[int]
) -> tuple[list[int], FinishReason | None, int | None]:
    """Return the sampled tokens up to the first stop rule that holds, why it ends, and the stop id (None for EOS)."""
    request, params = seq.request, seq.request.params
    if sampled and request.max_tokens == 0:  # echo: the prompt was wanted, not a token
        return [], "length", None
    for i, token in enumerate(sampled):
        count = seq.num_output + i + 1
        # Under a grammar, EOS comes before ``min_tokens`` only where nothing else can follow.
        finished = params.grammar is not None and token in eos_ids
        if token in seq.stop_ids and (finished or count >= params.min_tokens):
            is_eos = token in eos_ids and not params.ignore_eos
            return sampled[: i + 1], "stop", None if is_eos else token
        if count >= seq.max_output:
            return sampled[: i + 1], "length", None
    return sampled, None, None
