"""Suggestions: a typo finds its name, and names that only look similar are not offered."""

from __future__ import annotations

import pytest

from kvasir.api.protocols.openai import ChatBody
from kvasir.errors import nearest

NAMES = [*ChatBody.model_fields, "max_num_seqs", "--max-num-seqs", "--json"]


@pytest.mark.parametrize(
    "word, name",
    [
        ("temprature", "temperature"),
        ("emperature", "temperature"),
        ("Temperature", "temperature"),
        ("top-k", "top_k"),
        ("maxtokens", "max_tokens"),
        ("max_num_seq", "max_num_seqs"),
        ("max_num_sequences", "max_num_seqs"),
        ("--max-num-sequences", "--max-num-seqs"),
        ("--jason", "--json"),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_a_typo_finds_its_name(word, name):
    assert nearest(word, NAMES) == f" Did you mean '{name}'?"


@pytest.mark.parametrize("word", ["length_penalty", "min_length", "prompt_token_ids", "--echo", ""])
def test_other_parameters_are_not_suggested(word):
    assert nearest(word, NAMES) == ""
