"""Tokens that a stranger's tokenizer_config.json declares: an error that names the field, or a tokenizer that works."""

from __future__ import annotations

import json
import shutil

import pytest

from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.declared_tokens import MAX_CHARS, NAMED, added_tokens
from kvasir.models.tokenizer import Tokenizer

FIELDS = [*NAMED, "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"]
VALUES = [None, True, -1, 1.5, float("nan"), 10**400, "", "x", [], [1], [[]], ["x"] * 3, {}, {"a": 1}, {"content": 5}]
VALUES += ["\ud800", "x" * (MAX_CHARS + 1), {"5": {"content": ["x"]}}, {"5": {"content": "x", "lstrip": "no"}}]
VALUES += [{"5": {"content": "x", "no_such_flag": True}}, {"9" * 400: {"content": "x"}}, {"content": {"content": 1}}]


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        source = checkpoint.resolve("nano") / name
        if source.exists():
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_a_field(folder, field):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    refused = 0
    for value in VALUES:
        file.write_text(json.dumps(config | {field: value}))
        try:
            assert Tokenizer.load(folder).encode("hello world")
        except ConfigError as e:
            refused += 1
            assert field in str(e) and len(str(e)) < 400, value
    assert 8 <= refused < len(VALUES)


def test_a_long_list_in_place_of_a_text_takes_no_time(folder):
    """Its text of 20 MB became a special token."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"bos_token": ["x" * 16] * 10**6}))
    with pytest.raises(ConfigError, match="bos_token"):
        Tokenizer.load(folder)


def test_published_forms_are_read():
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
    found = added_tokens({"added_tokens_decoder": {"10": token, "2": {**token, "content": "</s>"}}})
    assert [(i, t.content, t.special) for i, t in found] == [(2, "</s>", True), (10, "<s>", True)]
