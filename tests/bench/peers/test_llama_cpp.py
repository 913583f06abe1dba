"""The llama.cpp peer on a stand-in for its C API: a step serves all sequences and computes only what was asked for."""

import importlib
import sys

import pytest

from kvasir.bench import compare, roofline
from kvasir.bench.case import parse
from kvasir.bench.peers.llama_cpp import LlamaCpp
from kvasir.bench.worker import check_peer
from kvasir.errors import ConfigError
from tests.bench.helpers import SITE
from tests.bench.test_result import check

OPTIONS = {"num_threads": 2, "max_num_seqs": 16, "max_model_len": 40}
# Enough for more tokens to take longer than one on a busy machine.
TOKENS = 32


@pytest.fixture
def api(monkeypatch):
    def take() -> dict:
        names = [name for name in sys.modules if name.partition(".")[0] in ("llama_cpp", "gguf")]
        return {name: sys.modules.pop(name) for name in names}

    real = take()  # with submodules: a package that is imported again does not get those that are there already
    monkeypatch.syspath_prepend(SITE)
    yield importlib.import_module("llama_cpp")
    take()
    sys.modules.update(real)


def model(tmp_path, **changes):
    (tmp_path / "m").write_text('{"tensors": {"a": {}}}')
    return LlamaCpp(tmp_path / "m", **OPTIONS | changes)


def greedy(api, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(api.next_token(tokens))
    return tokens[len(prompt) :]


def test_every_prompt_gets_its_own_completion(tmp_path, api, capfd):
    engine = model(tmp_path)
    # 168 rows make seven batches, and some prompts end in the middle of one.
    prompts = [[7 * i + j for j in range(3 + i)] for i in range(16)]
    assert engine.generate(prompts, 5) == [greedy(api, p, 5) for p in prompts]
    assert engine.generate(prompts[2:4], 1) == [greedy(api, p, 1) for p in prompts[2:4]], (
        "nothing is left of the run before"
    )
    assert engine.generate([list(range(24))], 16) == [greedy(api, range(24), 16)], (
        "a batch that is exactly full, and a full context"
    )
    assert capfd.readouterr().err == "a word of warning\n"


def test_failures_have_words(tmp_path, api):
    engine = model(tmp_path)
    with pytest.raises(ValueError, match="llama_decode answered 1"):
        engine.generate([[1] * 39], 3)
    with pytest.raises(ValueError, match="llama_decode answered -1"):
        engine.generate([[1]] * 17, 1)
    with pytest.raises(ValueError, match="could not load"):
        model(tmp_path, num_threads=13)
    with pytest.raises(KeyError):
        model(tmp_path, kv_type="int3")


def test_as_the_peer_of_a_case(monkeypatch):
    monkeypatch.setattr(
        roofline, "machine_rates", lambda device, dtype: {"copy_bytes_s": 1e10, "matmul_flop_s": 1e11, "dtype_bytes": 4}
    )
    table = {
        "model": "nano",
        "repeats": 1,
        "settings": {"num_threads": 1, "device": "cpu"},
        "peer": {
            "name": "llama_cpp",
            "repeats": [1, 0],
            "options": {"file_type": "f32", **OPTIONS},
            "variants": {"llama_cpp_q8_0": {"file_type": "q8_0", "extra_buffers": False}},
        },
        "workloads": {"two": {"batch": 2, "prompt": 8, "output": TOKENS}},
    }
    found = compare.measure(parse("c", table), peer=True, site=SITE)
    check(found)
    assert [a["name"] for a in found["arms"]] == ["kvasir", "llama_cpp", "llama_cpp_q8_0"]
    assert (
        found["arms"][1]["metrics"]["two.decode_tok_s"]["n"] == 1
        and found["arms"][1]["config"]["version"] == "0.0.fake"
    )
    assert {"two.decode_tok_s kvasir/llama_cpp", "two.decode_tok_s kvasir/llama_cpp_q8_0"} <= set(found["ratios"])


def test_what_to_install():
    with pytest.raises(ConfigError, match="pip install llama-cpp-python gguf"):
        check_peer("llama_cpp", None)
