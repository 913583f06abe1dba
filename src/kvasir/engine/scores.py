"""Scores of a prompt, reported once with its first event: every token's log-probability, or one record of their sum.

Only rows that were asked for go through the head (``spans.next_span``), a slice at a time (``decoding.sampler``). A
prefix hit ends before the first of them: the cache holds keys and values, not logits.
"""

from __future__ import annotations

from kvasir.decoding.confidence import summed_up
from kvasir.types import PromptScore, Sequence, TokenLogprob


def prompt_logprobs(seq: Sequence) -> list[TokenLogprob | None] | None:
    """Log-probabilities of all prompt tokens, None for the first. None as a whole if they were not asked for."""
    if seq.request.params.prompt_logprobs is None or seq.branch:
        return None
    return [None, *seq.state.pop("scores", [])]


def prompt_score(seq: Sequence) -> PromptScore | None:
    """Summary of the tokens from ``score_from`` on; None if it was not asked for."""
    params = seq.request.params
    if params.score_from is None or seq.branch:
        return None
    scores: list[TokenLogprob] = seq.state.pop("scores", [])
    mean, lowest = summed_up([s.confidence for s in scores if s.confidence is not None], params.confidence_window)
    return PromptScore(sum(s.logprob for s in scores), len(scores), mean, lowest)
