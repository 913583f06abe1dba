"""The one validator: the requests that it admits, and the bad input it refuses, naming the parameter."""

from __future__ import annotations

import math

import pytest

from kvasir.client.admission import admit
from kvasir.errors import RequestError
from kvasir.types import Grammar, ModelInfo, SamplingParams

INFO = ModelInfo(name="m", max_model_len=64, vocab_size=128, tokenizer_size=120, eos_ids=(1,), kv_capacity_tokens=1000)
PROMPT = [3, 4, 5]
BIG = 10**400  # no float holds it


def encode(text: str) -> list[int]:
    """A tokenizer of characters; a leading space belongs to the letter after it."""
    head = [ord(text[1]) % 100 + 3] if text[:1] == " " and len(text) > 1 else []
    return head + [ord(c) % 60 + 3 for c in (text[2:] if head else text)]


def go(prompt=None, info=INFO, encode=encode, priority=0, **params):
    prompt = PROMPT if prompt is None else prompt
    return admit(
        prompt, SamplingParams(**params), info, id="r1", arrival=1.5, tenant="t", priority=priority, encode=encode
    )


BAD_PARAMS = {
    "temperature": [-1, -1e-9, math.nan, math.inf, 1e308, 10.01, BIG, True, "1", None, [1.0]],
    "top_p": [0, 0.0, -0.5, 1.0001, math.nan, math.inf, False, True, "0.5", None],
    "top_k": [-5, -2, 2**63, 2**70, BIG, 1.0, 1.5, True, "3", None, math.nan],
    "min_p": [-0.1, 1.1, math.nan, True, "0", None],
    "presence_penalty": [-2.1, 2.1, math.inf, -math.inf, math.nan, True, "0", None],
    "frequency_penalty": [-2.1, 2.1, math.inf, math.nan, False, "0", None],
    "repetition_penalty": [0, 0.0, -1, 10.1, math.inf, math.nan, True, "1", None],
    "n": [0, -1, 257, 2**31, 1.0, True, "1", None],
    "max_tokens": [0, -1, 10**12, 2**63, 2**70, BIG, 5.0, True, "5", math.nan, 62],
    "min_tokens": [-1, 17, 2**63, 1.0, True, "1", None],
    "logprobs": [-1, 21, 128, 1.0, True, "1"],
    "prompt_logprobs": [-1, 21, 2.0, True, "1"],
    "confidence": [-1, 1, 21, 2.0, True, "5", None],
    "confidence_window": [-1, 4, 1.0, None],
    "finish_after": [0, -1, 2, 1.0, True],
    "thinking_token_budget": [-1, 1.5, 5.0, True, "5", 2**63, math.nan],
    "processors": [["a"] * 5, [""], ["x" * 513], [3], [None], ["\ud800"]],
    "lease": [-1, 601, math.inf, math.nan, True, "1", None],
    "score_from": [0, -1, 10**6, 1.0, True, "1"],
    "seed": [2**64, -(2**63) - 1, BIG, 1.0, True, "x", math.nan],
    "stop": [[""], ["a"] * 17, ["x" * 257], ["x" * 1_000_000], [3], [None], [b"a"], ["\ud800"], ["ok", ""]],
    "stop_token_ids": [[-1], [120], [128], [2**31], [1.0], [True], ["1"], [3] * 129, [None]],
    "logit_bias": [
        {"abc": 1.0},
        {-1: 1.0},
        {"-1": 1.0},
        {120: 1.0},
        {128: 1.0},
        {3: math.inf},
        {3: math.nan},
        {3: 101.0},
        {3: -100.5},
        {3: "1"},
        {3: True},
        {3: None},
        {True: 1.0},
        {1.5: 1.0},
        {"1" * 5000: 1.0},
        {"٣": 1.0},
        {i: 0.0 for i in range(100_000)},
    ],
    "allowed_token_ids": [[], [120], [-1], [1.5], [True], ["3"], list(range(5000)), [2**40]],
    "bad_words": [[""], ["  "], ["x" * 10_000], ["a"] * 257, [3], [None], ["\udc00"], ["x" * 65]],
    "logprobs_mode": ["both", "", None, 1],
    "ignore_eos": [1, "true", None],
    "detokenize": [1, None],
    "skip_special_tokens": [0, "no"],
    "include_stop_str_in_output": [1, None],
    "grammar": [
        "abc",
        {"kind": "regex"},
        Grammar("xml", "a"),
        Grammar("regex", 3),
        Grammar("regex", "x" * 65537),
        Grammar("regex", "\ud800"),
        Grammar("regex", "é" * 40_000),
        Grammar("regex", "a", after=tuple(range(65))),
    ],
}


def label(name, value):
    return f"{name}=huge" if value is BIG else f"{name}={value!r:.40}"


@pytest.mark.parametrize(
    "name,value", [pytest.param(n, v, id=label(n, v)) for n, values in BAD_PARAMS.items() for v in values]
)
def test_bad_parameters(name, value):
    with pytest.raises(RequestError) as caught:
        go(**{name: value})
    assert caught.value.status == 400 and caught.value.param == name
    assert len(caught.value.message) < 500


BAD_PROMPTS = [
    [],
    "text",
    None,
    b"\x03",
    [3, -1],
    [128],
    [120],
    [2**31],
    [2**63],
    [BIG],
    [1.0],
    [True],
    ["3"],
    [[3]],
    [None],
    {3: 4},
    [3] * 64,
    [3] * 65,
    [3] * 100_000,
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: "huge" if p == [BIG] else f"{p!r:.30}")
def test_bad_prompts(prompt):
    with pytest.raises(RequestError) as caught:
        admit(prompt, SamplingParams(max_tokens=1), INFO, id="r", arrival=0.0)
    assert caught.value.status == 400 and caught.value.param == "prompt" and len(caught.value.message) < 500


@pytest.mark.parametrize("length", [1, 62, 63])
def test_prompts_up_to_the_context_less_one(length):
    assert go([3] * length, max_tokens=1).max_tokens == 1


def test_the_messages_name_both_numbers():
    with pytest.raises(RequestError, match=r"3 prompt tokens and max_tokens=62 .*64") as caught:
        go(max_tokens=62)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="64 tokens.*64.*63"):
        go([3] * 64)


def test_max_tokens_none_is_what_is_left():
    assert go(max_tokens=None).max_tokens == 61
    assert go(max_tokens=61).max_tokens == 61
    assert go([3] * 63, max_tokens=None).max_tokens == 1


def test_prompt_and_output_must_fit_the_cache():
    small = ModelInfo(name="m", max_model_len=64, vocab_size=128, tokenizer_size=120, kv_capacity_tokens=32)
    assert go(info=small, max_tokens=29).max_tokens == 29
    assert go(info=small, max_tokens=None).max_tokens == 29
    with pytest.raises(RequestError, match="cache of 32"):
        go(info=small, max_tokens=30)
    with pytest.raises(RequestError, match="holds 32") as caught:
        go([3] * 32, info=small, max_tokens=1)
    assert caught.value.param == "prompt"
    unknown = ModelInfo(name="m", max_model_len=64, vocab_size=128, tokenizer_size=120)
    assert go(info=unknown, max_tokens=60).max_tokens == 60


def test_min_tokens_is_compared_after_defaults_are_resolved():
    assert go(max_tokens=None, min_tokens=61).params.min_tokens == 61
    with pytest.raises(RequestError) as caught:
        go(max_tokens=None, min_tokens=62)
    assert caught.value.param == "min_tokens" and "62" in caught.value.message and "61" in caught.value.message


GOOD = [
    ("temperature", 0, 0.0),
    ("temperature", 10, 10.0),
    ("temperature", 1e-30, 1e-30),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 1, 1),
    ("top_k", 121, 120),
    ("top_k", 2**63 - 1, 120),
    ("min_p", 1, 1.0),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 10, 10.0),
    ("repetition_penalty", 1e-3, 1e-3),
    ("n", 16, 16),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 20, 20),
    ("stop", "end", ("end",)),
    ("stop", ["x" * 256] * 16, ("x" * 256,) * 16),
    ("stop", ["\x00"], ("\x00",)),
    ("stop_token_ids", [5, 119, 5], (5, 119)),
    ("logit_bias", {3: 100, "4": -100.0}, {3: 100.0, 4: -100.0}),
    ("allowed_token_ids", [5, 6, 5], (5, 6)),
    ("logprobs_mode", "processed", "processed"),
    ("grammar", Grammar("json_object"), Grammar("json_object")),
    ("seed", 2**64 - 1, 2**64 - 1),
]


@pytest.mark.parametrize("name,value,becomes", GOOD, ids=lambda v: f"{v!r:.30}")
def test_good_values_and_what_they_become(name, value, becomes):
    request = go(**{name: value})
    found = getattr(request.params, name)
    assert found == becomes and type(found) is type(becomes)


@pytest.mark.parametrize("seed,stream", [(0, 0), (5, 5), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_seeds_are_taken_modulo_two_to_the_64(seed, stream):
    assert go(seed=seed).seed == stream


def test_no_seed_is_a_fresh_stream():
    seeds = {go().seed for _ in range(50)}
    assert len(seeds) == 50 and all(0 <= s < 2**64 for s in seeds)


def test_everything_else_is_carried_over():
    prompt = list(PROMPT)
    request = go(prompt, priority=-3)
    assert (request.id, request.arrival, request.tenant, request.priority) == ("r1", 1.5, "t", -3)
    assert request.prompt_ids == prompt and request.prompt_ids is not prompt
    for priority in (1.5, True, 2**63, "1"):
        with pytest.raises(RequestError) as caught:
            go(priority=priority)
        assert caught.value.param == "priority"


def test_bad_words_with_and_without_a_leading_space():
    assert go(bad_words=["ab"]).bad_words == go(bad_words="ab").bad_words == [encode("ab"), encode(" ab")]
    assert go(bad_words=[" ab", "ab"]).bad_words == [encode("ab"), encode(" ab")]
    assert go(bad_words=["x"], encode=lambda text: [7]).bad_words == [[7]]
    assert go(bad_words=["x"], encode=lambda text: []).bad_words == []
    with pytest.raises(RequestError) as caught:
        go(bad_words=["x"], encode=None)
    assert caught.value.param == "bad_words" and "tokenizer" in caught.value.message


def test_stop_strings_need_text():
    with pytest.raises(RequestError) as caught:
        go(stop=["x"], detokenize=False)
    assert caught.value.param == "stop"


def test_without_a_tokenizer_every_logit_is_an_id():
    bare = ModelInfo(name="m", max_model_len=64, vocab_size=128, tokenizer_size=0)
    assert go([127], info=bare).prompt_ids == [127]
    with pytest.raises(RequestError):
        go([128], info=bare)


def test_parameters_of_another_type():
    with pytest.raises(RequestError) as caught:
        admit(PROMPT, {"temperature": 1}, INFO, id="r", arrival=0.0)
    assert caught.value.param == "params"


def test_importing_the_validator_needs_no_torch():
    import subprocess
    import sys

    code = "import kvasir.client.admission, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
