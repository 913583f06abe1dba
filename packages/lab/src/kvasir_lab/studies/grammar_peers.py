"""Compare our grammar compiler (llguidance) with XGrammar on the same schemas and tokens.

    python -m kvasir_lab.studies grammar_peers RESULT.json [--schemas 200] [--vocabulary 16384] [--repeats 3]

It needs `pip install xgrammar`, which kvasir itself does not use. Schemas are drawn from a seed: nested objects,
arrays, enums, numbers, optional and `anyOf` members. Each comes with a value that it allows; its text is walked token
by token, and each token must be in the mask of either library. The tokenizer is a byte-level BPE trained on the lab's
texts.

``compile_ms`` is the time from the schema's text to the first mask. ``mask_us`` is the mask of a later token and its
acceptance, called from Python one at a time. Both libraries use one thread and no cache. They take turns schema by
schema, and the least of the repeats counts. ``refused`` schemas count nowhere else.
"""

from __future__ import annotations

import bz2
import json
import random
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvasir.bench.result import percentile
from kvasir.decoding.grammar import GrammarCompiler
from kvasir.errors import RequestError
from kvasir.types import Grammar
from kvasir_lab.study import ROOT, Arms, Report, study

WORDS = "name city unit street number score title author price tags items kind value date user mail note".split()


def drawn(rng: random.Random, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """A schema and a value that it allows."""
    kind = rng.choice(("string", "integer", "number", "boolean", "enum", "any") + ("array", "object") * (depth < 3))
    if depth == 0 or kind == "object":
        names = rng.sample(WORDS, rng.randint(2, 6))
        parts = {name: drawn(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in parts.items()},
            "required": required,
            "additionalProperties": False,
        }
        return schema, {n: value for n, (_, value) in parts.items() if n in required or rng.random() < 0.5}
    if kind == "array":
        item, value = drawn(rng, depth + 1)
        return {"type": "array", "items": item, "minItems": 1, "maxItems": 4}, [value] * rng.randint(1, 3)
    if kind == "any":
        either = [drawn(rng, 9), drawn(rng, 9)]
        return {"anyOf": [schema for schema, _ in either]}, rng.choice(either)[1]
    if kind == "enum":
        words = rng.sample(WORDS, 4)
        return {"enum": words}, rng.choice(words)
    value = {
        "string": " ".join(rng.choices(WORDS, k=rng.randint(1, 8))),
        "integer": rng.randint(-9999, 9999),
        "number": rng.randint(1, 9999) / 8,
        "boolean": rng.random() < 0.5,
    }[kind]
    return {"type": kind}, value


def tokenizer(size: int, texts: list[str]) -> Tokenizer:
    """A byte-level BPE of ``size`` tokens, trained on ``texts``; the first token ends a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


class Ours:
    """llguidance, as the engine calls it."""

    def __init__(self, backend: Tokenizer) -> None:
        size = backend.get_vocab_size()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            backend.save(str(file))
            self._compiler = GrammarCompiler(file, size, (0,))
        self._mask = np.zeros(-(-size // 32), np.int32)

    def begin(self, schema: str) -> None:
        self._matcher = self._compiler.compile(Grammar("json_schema", schema))
        self._matcher.fill(self._mask)

    def step(self, token: int) -> bool:
        """Take a token of the mask at hand, and compute the next mask."""
        allowed = bool(self._mask[token // 32] >> (token % 32) & 1)
        self._matcher.accept([token])
        self._matcher.fill(self._mask)
        return allowed


class XGrammar:
    """XGrammar with its defaults, except for one thread and no cache."""

    def __init__(self, backend: Tokenizer) -> None:
        import xgrammar

        self._library, size = xgrammar, backend.get_vocab_size()
        words = [word for word, _ in sorted(backend.get_vocab().items(), key=lambda entry: entry[1])]
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[0], add_prefix_space=False
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = np.zeros((1, -(-size // 32)), np.int32)

    def begin(self, schema: str) -> None:
        self._matcher = self._library.GrammarMatcher(self._compiler.compile_json_schema(schema))
        self._fill()

    def _fill(self) -> None:
        if not self._matcher.fill_next_token_bitmask(self._mask):
            self._mask[:] = -1  # all are allowed, and it wrote nothing

    def step(self, token: int) -> bool:
        allowed = bool(self._mask[0, token // 32] >> (token % 32) & 1)
        self._matcher.accept_token(token)
        self._fill()
        return allowed


def timed(library: Any, schema: str, tokens: list[int]) -> tuple[float, list[float], int]:
    """Seconds to compile, seconds of each token, and the number of tokens that were not allowed."""
    clock: Callable[[], float] = time.perf_counter
    began = clock()
    library.begin(schema)
    compiled, steps, wrong = clock() - began, [], 0
    for token in tokens[:-1]:
        began = clock()
        wrong += not library.step(token)
        steps.append(clock() - began)
    return compiled, steps, wrong


@study("grammar-peers")
def main(report: Report, *, schemas: int = 200, vocabulary: int = 16_384, repeats: int = 3) -> Arms:
    files = sorted((ROOT / "packages/lab/src/kvasir_lab/text").glob("*.bz2"))
    backend = tokenizer(vocabulary, [bz2.decompress(file.read_bytes()).decode() for file in files])
    rng = random.Random(7)
    libraries = {"llguidance": Ours(backend), "xgrammar": XGrammar(backend)}
    compiled: dict[str, list[float]] = {name: [] for name in libraries}
    masks: dict[str, list[float]] = {name: [] for name in libraries}
    wrong, refused, count = dict.fromkeys(libraries, 0), dict.fromkeys(libraries, 0), 0
    for _ in range(schemas):
        schema, value = drawn(rng)
        text, tokens = json.dumps(schema), backend.encode(json.dumps(value)).ids
        found: dict[str, list[tuple[float, list[float], int]]] = {name: [] for name in libraries}
        try:
            for _ in range(repeats):
                for name, library in libraries.items():
                    found[name].append(timed(library, text, tokens))
        except (RequestError, RuntimeError) as e:
            refused[name] += 1
            print(f"{name} refuses {text[:200]}: {e}", flush=True)
            continue
        count += 1
        for name, rounds in found.items():
            compiled[name].append(min(one[0] for one in rounds))
            masks[name] += [min(times) for times in zip(*(one[1] for one in rounds))]
            wrong[name] += rounds[0][2]
    for name in libraries:
        metrics: dict[str, Any] = {"schemas": count, "tokens": len(masks[name])}
        metrics |= {"refused": refused[name], "tokens_not_allowed": wrong[name]}
        for label, values, unit in (("compile_ms", compiled[name], 1e3), ("mask_us", masks[name], 1e6)):
            metrics |= {f"{label}_p{p}": round(unit * percentile(values, p / 100), 3) for p in (50, 99)}
            metrics[f"{label}_mean"] = round(unit * sum(values) / len(values), 3)
        yield name, {"vocabulary": backend.get_vocab_size(), "peer_version": version(name)}, metrics
