"""Log-probabilities in the three forms that clients expect: chat's, that of plain completions, and vLLM's for
prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvasir.models.tokenizer import Tokenizer
from kvasir.types import TokenLogprob

# Log-probability of tokens that cannot be sampled, as OpenAI reports it: JSON has no -Infinity.
FLOOR = -9999.0


def _value(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def namer(tokenizer: Tokenizer, as_ids: bool | None = False) -> Callable[[int], str]:
    """A function that names a token: its text, or ``token_id:N`` (vLLM's ``return_tokens_as_token_ids``), which also
    tells tokens of the same text apart."""
    return "token_id:{}".format if as_ids else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob], as_ids: bool | None = False, drafters: bool | None = False
) -> dict[str, Any]:
    """Chat's form: ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``.
    ``bytes`` are exact even for half a character. ``as_ids``: as in ``namer``. ``drafters``: also ``drafter``, the name
    of the drafter that proposed the token, or None."""
    name = namer(tokenizer, as_ids)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": _value(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return {
        "content": [
            {
                **entry(e.id, e.logprob),
                "top_logprobs": [entry(*t) for t in e.top],
                **({"drafter": e.drafter} if drafters else {}),
            }
            for e in entries
        ]
    }


def completion_logprobs(
    name: Callable[[int], str],
    entries: Iterable[TokenLogprob | None],
    ids: Sequence[int],
    offsets: Sequence[int],
    shift: int = 0,
) -> dict[str, Any]:
    """Form of plain completions: ``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``.

    ``name``: as ``namer`` gives it. ``shift`` is added to the offsets, in characters. An entry is None for the first
    token of a prompt, which nothing predicts.
    """
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry, offset in zip(ids, entries, offsets, strict=True):
        top: dict[str, float] = {}
        if entry is not None:
            for other, logprob in [(token, entry.logprob), *entry.top]:
                # Parts of characters share one name; the larger value shows whether the token was the likeliest.
                key = name(other)
                top[key] = max(top.get(key, FLOOR), _value(logprob))
        out["tokens"].append(name(token))
        out["token_logprobs"].append(None if entry is None else _value(entry.logprob))
        out["top_logprobs"].append(None if entry is None else top)
        out["text_offset"].append(shift + offset)
    return out


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], added: int) -> list[int]:
    """Start of each token's text in the echoed prompt, which does not include the first ``added`` tokens: those that
    the tokenizer added."""
    stream = tokenizer.stream()
    offsets, at = [0] * added, 0
    for token in ids[added:]:
        offsets.append(at)
        at += len(stream.push(token))
    return offsets


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Form of vLLM: for each prompt token an object by token id of ``{"logprob", "rank", "decoded_token"}``; None for
    the first token."""

    def table(entry: TokenLogprob) -> dict[str, Any]:
        rows = [
            (entry.id, entry.logprob, entry.rank),
            *((t, p, rank) for rank, (t, p) in enumerate(entry.top, start=1) if t != entry.id),
        ]
        return {
            str(t): {"logprob": _value(p), "rank": rank, "decoded_token": tokenizer.token_text(t)}
            for t, p, rank in rows
        }

    return [None if e is None else table(e) for e in entries]
