"""The tokenizer that the grammar library sees: text is spelled with ordinary tokens only.

The library tokenises text that a grammar forces with the model's own tokenizer, which reads ``<tool_call>`` as an added
token; its masks allow the added token only where a grammar names the token. The two disagreed, and every grammar whose
text is an added token's failed. Here every added token gets a name that no text holds, so that such text is made of
pieces and bytes. Grammars name added tokens by id (``by_id``).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

# Parts of a Lark grammar that may hold angle brackets without meaning a token, and token names.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\\n])++/|//[^\n]*+|#[^\n]*+|(?P<token><[^<>\s"]++>)', re.DOTALL)
_BY_ID = re.compile(r"<\[[\d,\-]*\]>|<\*>|<\[\*\]>")


def without_added_text(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which no text gives an added token. Ids stay what they are."""
    secret = secrets.token_hex(8)
    added = [dict(token) for token in tokenizer.get("added_tokens") or []]
    names = {token["content"]: f"\U0010ffff{secret}-{token['id']}" for token in added}
    for token in added:
        token |= {"content": names[token["content"]], "special": True, "normalized": False}
    plain = {"truncation": None, "padding": None, "post_processor": None}
    return {**tokenizer, **plain, "added_tokens": added, "model": _renamed(tokenizer.get("model"), names)}


def _renamed(model: Any, names: Mapping[str, str]) -> Any:
    """The model with new names for added tokens that its vocabulary holds, and without the merges that make them."""
    if not isinstance(model, Mapping):
        return model
    vocab, found = model.get("vocab"), dict(model)
    if isinstance(vocab, Mapping):
        if names.keys().isdisjoint(vocab):
            return found
        found["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    elif isinstance(vocab, list):
        found["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        found["unk_token"] = names[model["unk_token"]]
    prefix = len(model.get("continuing_subword_prefix") or "")
    if model.get("merges"):
        found["merges"] = [m for m in model["merges"] if names.keys().isdisjoint(_pieces(m, prefix))]
    return found


def _pieces(merge: Any, prefix: int) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right[prefix:]


def added_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the added tokens of a tokenizer.json by their text."""
    return {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}


def by_id(lark: str, added: Mapping[str, int]) -> str:
    """A Lark grammar that names added tokens by their id instead of their text. Unknown names stay: the library refuses
    them."""

    def name(found: re.Match) -> str:
        token = found["token"]
        if token is None or _BY_ID.fullmatch(token) or token not in added:
            return found[0]
        return f"<[{added[token]}]>"

    return _LARK.sub(name, lark)


def library_text(text: str) -> tuple[str, dict[str, int]]:
    """The text of a tokenizer.json for the grammar library, and the ids of its added tokens. Raises ValueError when the
    text is no tokenizer."""
    tokenizer = json.loads(text)
    try:
        return json.dumps(without_added_text(tokenizer)), added_ids(tokenizer)
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"it is no tokenizer.json: {e!r}") from e
