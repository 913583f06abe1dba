"""The benchmark of constrained output: its schemas, its tokenizer, and what it makes of replies."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from kvasir.bench import client
from kvasir.bench.client import Call, Reply, _request
from kvasir.decoding.grammar import GrammarCompiler
from kvasir.types import Grammar
from kvasir_lab.bench import constrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tokenizer")
    constrained.train_tokenizer(found, 700, most_bytes=1 << 16)
    return found


def test_the_tokenizer_has_words_and_an_end(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 700 and tokenizer.token_to_id("</s>") == 2
    assert tokenizer.decode(tokenizer.encode("def f(self): # é").ids) == "def f(self): # é"


@pytest.mark.parametrize("kind", ["text", "records", "long_keys"])
def test_schemas_compile_and_differ_by_salt(kind, folder):
    compiler = GrammarCompiler(folder / "tokenizer.json", 956, (2,))
    texts = {json.dumps(constrained.schema(kind, salt)) for salt in range(3)}
    assert len(texts) == 3
    for text in texts:
        assert not compiler.compile(Grammar("json_schema", text)).is_accepting()
    assert constrained.constraint("plain") == {}


def test_parameters_reach_the_body():
    place = SimpleNamespace(path="", netloc="x")
    raw = _request(place, "m", Call(0.0, [1], 4, constrained.constraint("text")), None)
    body = json.loads(raw.partition(b"\r\n\r\n")[2])
    assert body["structured_outputs"]["json"]["type"] == "array" and body["ignore_eos"] is False


def test_metrics(monkeypatch):
    """A server that takes 2 ms a token, or 1 ms under a schema, and three tokens a forward."""
    server = SimpleNamespace(
        name="kvasir", url="http://x", counters=lambda names: {name: counts[name] for name in names}
    )
    counts = dict.fromkeys(constrained.COUNTERS, 0.0)

    async def replay(url, model, calls, api_key=None):
        replies = []
        for call in calls:
            step = 0.001 if call.extra else 0.002
            times = array("d", [0.05 + step * i for i in range(call.output)])
            replies.append(Reply(0.0, 0.0, 200, times, call.output, 0, times[-1]))
            counts["generation_tokens"] += call.output
            counts["forwards"] += call.output / (3 if call.extra else 1)
            counts["forced_tokens"] += call.output / 2 if call.extra else 0
        return replies, []

    monkeypatch.setattr(client, "replay", replay)
    metrics = constrained.Loads(server, "m", 2, (1, 4)).run()
    assert metrics["plain4.token_ms"] == 2.0 and metrics["records4.over_plain"] == 0.5
    assert metrics["long_keys1.tokens_a_forward"] == 3.0 and metrics["long_keys1.forced_share"] == 0.5
    assert metrics["new_schema.ttft_ms"] == 50.0 and metrics["64_schemas.over_one"] == 1.0
