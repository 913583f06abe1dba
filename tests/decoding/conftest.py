"""Fixtures of the tests of grammars: a byte tokenizer and a compiler for it."""

from __future__ import annotations

import pytest

from kvasir.decoding.grammar import GrammarCompiler
from tests.decoding.grammars import EOT
from tests.decoding.helpers import EOS, byte_tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tok):
    return GrammarCompiler(tok[0], tok[2] + 9, (EOS, EOT))  # nine padding ids
