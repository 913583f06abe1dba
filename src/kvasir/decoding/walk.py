"""The walk: from the draws of a span's rows to the tokens that it emits.

Rows of a draft draw like any others. A draft is accepted as far as each of its tokens is the one that the row before
it drew.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from kvasir.types import Span, SpanResult, TokenLogprob


def resolve_span(
    span: Span,
    row_tokens: list[int],
    rows: Mapping[int, int] | Many[int],
    tokens: list[int],
    errors: dict[int, str],
    drawn: dict[int, TokenLogprob],
    scored: dict[int, TokenLogprob],
) -> SpanResult:
    """Resolve one span. ``row_tokens``: its tokens, if it verifies a draft; ``rows``: row in the span -> logit row."""
    result = SpanResult()
    score, sample = span.want.get("score", range(0)), span.want.get("sample", range(0))
    for i in score:
        if rows[i] in errors:
            return SpanResult(error=errors[rows[i]])
    if score:
        result.scores = [scored[rows[i]] for i in score]
    path = walk(span, row_tokens, sample, rows, tokens)
    good = next((n for n, i in enumerate(path) if rows[i] in errors), len(path))
    if sample and not good:
        return SpanResult(error=errors[rows[path[0]]])
    # An error further down the path is left to the step that starts there, as without a draft.
    result.tokens = [tokens[rows[i]] for i in path[:good]]
    if row_tokens:
        result.path = path[:good]
    if drawn and path and rows[path[0]] in drawn:
        result.logprobs = [drawn[rows[i]] for i in path[:good]]
        for token, entry in zip(result.tokens, result.logprobs):
            entry.id = token
    return result


def walk(
    span: Span, row_tokens: list[int], sample: range, rows: Mapping[int, int] | Many[int], tokens: list[int]
) -> list[int]:
    """Return the rows of the span whose draws are emitted: from the first sampled row on, while the draft has the drawn
    token."""
    if not sample:
        return []
    if len(sample) == 1:
        return [sample[0]]
    children: dict[tuple[int, int], int] = {}
    for i in sample[1:]:
        children.setdefault((span.parents[i] if span.parents else i - 1, row_tokens[i]), i)
    path, i = [], sample[0]
    while True:
        path.append(i)
        if (i, tokens[rows[i]]) not in children:
            return path
        i = children[i, tokens[rows[i]]]
