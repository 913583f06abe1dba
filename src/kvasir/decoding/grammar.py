"""Structured output: a grammar becomes a mask over the next token. A thin layer over ``llguidance``.

Compiling takes milliseconds. Sizes are checked before the library sees the text, and the library's own fuel bounds most
of the rest; what it does not bound ends in ``grammar_process``. ``GrammarCompiler.compile`` may run in a worker thread.
A compiled ``Matcher`` is never advanced itself: every branch, and every return from preemption, takes a ``copy``
(microseconds) and replays its output.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import llguidance
import numpy as np

from kvasir.decoding.grammar_source import library_source, schema_source
from kvasir.decoding.grammar_tokenizer import library_text
from kvasir.decoding.matcher import Matcher, reason
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

MAX_TEXT_BYTES = 64 << 10
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 200_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class GrammarCompiler:
    """Compiles grammars for one tokenizer. ``vocab_size``: width of the logits; ``tokenizer_file``: tokenizer.json."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Raises ConfigError when the library cannot read the tokenizer."""
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        try:
            text, self._added = library_text(Path(tokenizer_file).read_text(encoding="utf-8"))
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        except (OSError, ValueError) as e:
            raise ConfigError(f"structured output cannot read the tokenizer {tokenizer_file}: {e}") from e

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of ``grammar``. Blocks for milliseconds.

        Raises RequestError (400) when the grammar is malformed, exceeds the limits above, uses something that the
        library does not support, or allows no output at all. It names the place of ``grammar.parts`` that is at fault.
        Run it on text of clients only after ``grammar_process`` has tried that text: the library may crash."""
        try:
            return self._compile(grammar)
        except RequestError:
            for place, schema in grammar.parts:
                try_schema(schema, place)
            raise

    def _compile(self, grammar: Grammar) -> Matcher:
        param = "grammar"  # the name in SamplingParams; a route knows by which of its names the client sent it
        if not self.eos_ids:
            raise RequestError("structured output needs a model with an end-of-sequence token", param=param)
        try:
            size = len(grammar.text.encode())
        except UnicodeEncodeError as e:
            raise RequestError("the grammar is not valid Unicode", param=param) from e
        if size > MAX_TEXT_BYTES:
            raise RequestError(f"the grammar is larger than {MAX_TEXT_BYTES} bytes", param=param)
        source = library_source(grammar, self._added, param)
        inner = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        matcher = Matcher(inner, self.vocab_size, self.eos_ids)
        mask = np.zeros(-(-self.vocab_size // 32), np.int32)
        if not matcher.fill(mask):
            # Other kinds were translated: a place in the translation tells the user nothing.
            why = matcher.error if grammar.kind == "lark" else re.sub(r"^at \d+\(\d+\): ", "", matcher.error)
            raise RequestError(f"the grammar cannot be used: {why}", param=param)
        if not mask.any():
            raise RequestError("the grammar allows no output at all", param=param)
        return Matcher(inner, self.vocab_size, self.eos_ids, grammar.after)


def try_schema(schema: str, param: str) -> None:
    """Refuse a schema, the JSON of one that was checked, that does not compile. Needs no tokenizer."""
    try:
        source = schema_source(json.loads(schema), param)
        why = reason(llguidance.LLMatcher.validate_grammar(source, limits=llguidance.LLParserLimits(**_LIMITS)))
    except RequestError as e:
        raise RequestError(e.message, param=e.param, code=e.code or "invalid_grammar") from e
    except ValueError as e:
        why = str(e)
    if why:
        raise RequestError(f"the schema cannot be used: {why}", param=param, code="invalid_grammar")
