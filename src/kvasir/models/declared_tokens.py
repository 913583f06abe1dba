"""The tokens that tokenizer_config.json and special_tokens_map.json declare, checked: folders come from strangers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken

from kvasir.errors import ConfigError

FILE = "tokenizer_config.json"
# Fields that name one token each.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Longest text of a declared token, and most of them. Published tokenizers have some hundred of at most 60 characters.
MAX_CHARS, MAX_TOKENS = 1024, 1 << 17


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the tokens that have a field of their own, by its name. Raises ConfigError."""
    return {name: _text(config[name], name) for name in NAMED if config.get(name)}


def extra_specials(config: Mapping[str, Any]) -> list[str]:
    """The texts of the further special tokens. Raises ConfigError."""
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        group = config.get(name) or []
        listed = list(group.values()) if isinstance(group, dict) else group
        if not isinstance(listed, list) or len(listed) > MAX_TOKENS:
            raise ConfigError(f"{FILE}: {name} is no list of at most {MAX_TOKENS} tokens")
        found += [_text(token, name) for token in listed if token != ""]
    return found


def added_tokens(config: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """The tokens of ``added_tokens_decoder`` by ascending id. Raises ConfigError."""
    where, table = "added_tokens_decoder", config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict) or len(table) > MAX_TOKENS:
        raise ConfigError(f"{FILE}: {where} is no object of at most {MAX_TOKENS} tokens")
    found = []
    for key, token in table.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12) or not isinstance(token, dict):
            raise ConfigError(f"{FILE}: {where} has {key[:40]!r}, expected a token's id and an object")
        text = _text(token, f"{where}[{key}]")
        flags = {k: v for k, v in token.items() if k not in ("__type", "content")}
        try:
            found.append((int(key), AddedToken(text, **flags)))
        except TypeError as e:
            raise ConfigError(f"{FILE}: {where}[{key}]: {e}") from e
    return sorted(found, key=lambda pair: pair[0])


def _text(token: Any, where: str) -> str:
    """The text of a token that is written as itself or as an object. Raises ConfigError."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or not text or len(text) > MAX_CHARS or any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{FILE}: {where} is {repr(text)[:80]}, expected a token's text")
    return text
