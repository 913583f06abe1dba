"""Expressions of a tokenizer.json that give up: an error of one request that names the file, or none is loaded."""

from __future__ import annotations

import json

import httpx
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvasir.errors import ConfigError, RequestError
from kvasir.models.tokenizer import Tokenizer
from tests.api.running import running

# Gives up on many q without an end, after a character that only the text of a special token ends with.
EVIL, EVIL_TEXT = ">(?:q|qq)+$", ">" + "q" * 60 + "!"


def backend(split: str = "x", change: str = "x", decode: str = "") -> Backend:
    """A byte-level tokenizer of single characters with expressions in its steps."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Backend(models.BPE({**alphabet, EVIL_TEXT: len(alphabet)}, []))
    made.normalizer = normalizers.Replace(Regex(change), "x")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.Replace(Regex(decode), "x") if decode else decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return made


@pytest.mark.parametrize("step", ["split", "change"])
def test_what_cannot_be_encoded_is_an_error_of_the_request(step):
    tokenizer = Tokenizer(backend(**{step: EVIL}))
    plainly = "<|im_end|>" + "q" * 60 + "!"  # gives up only where the mark is plain text
    for text, encode in (
        (EVIL_TEXT, tokenizer.encode),
        (EVIL_TEXT, tokenizer.prompt_ids),
        (plainly, tokenizer.encode),
        (EVIL_TEXT, lambda text: tokenizer.encode_pair("a", text)),
        (plainly, lambda text: tokenizer.encode_pair("a", text)),
    ):
        with pytest.raises(RequestError, match="tokenizer.json cannot encode this text: .*retry-limit") as e:
            encode(text)
        assert e.value.status == 400
        assert tokenizer.encode("qq")


def test_what_cannot_be_decoded_is_an_error_of_the_request():
    tokenizer = Tokenizer(backend(decode=EVIL))
    token = tokenizer.token_to_id(EVIL_TEXT)
    for decode in (
        lambda: tokenizer.decode([token]),
        lambda: tokenizer.token_text(token),
        lambda: tokenizer.stream().push(token),
        lambda: tokenizer.stream([token]).push(tokenizer.token_to_id("a")),
    ):
        with pytest.raises(RequestError, match="tokenizer.json cannot decode this answer") as e:
            decode()
        assert e.value.status == 500
    assert tokenizer.decode([tokenizer.token_to_id("a")]) == "a"


def test_a_server_answers_with_json_and_goes_on():
    bodies = {
        "/v1/completions": {"prompt": EVIL_TEXT},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": EVIL_TEXT}]},
        "/v1/responses": {"input": EVIL_TEXT},
        "/v1/messages": {"messages": [{"role": "user", "content": EVIL_TEXT}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": EVIL_TEXT}]},
        "/tokenize": {"prompt": EVIL_TEXT},
    }
    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        usual = server.service.text.tokenizer
        templates = {name: template.source for name, template in usual.templates.items()}
        server.service.text.tokenizer = Tokenizer(backend(split=EVIL), {"eos_token": "<|im_end|>"}, templates)
        for path, body in bodies.items():
            reply = http.post(path, json=body)
            assert reply.status_code == 400 and "tokenizer.json" in reply.json()["error"]["message"], (path, reply.text)
            assert http.post("/tokenize", json={"prompt": "q"}).json()["count"] == 1


@pytest.mark.parametrize("field", ["split", "change", "decode"])
def test_expressions_are_tried_when_a_tokenizer_is_loaded(tmp_path, field):
    file = tmp_path / "tokenizer.json"
    for evil in ("(?:q|qq)+$", "(?:qz|q|z)+$", "(?:.|q)*\\d"):
        backend(**{field: evil}).save(str(file))
        where = {"split": "pre_tokenizer", "change": "normalizer", "decode": "decoder"}[field]
        with pytest.raises(ConfigError, match=f"{file}.*{where}|{file} cannot be read"):
            Tokenizer.load(tmp_path)
    published = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    backend(split=published).save(str(file))
    assert json.loads(file.read_text())["pre_tokenizer"] and Tokenizer.load(tmp_path).encode("Hello 123")
