"""Start commands of vLLM's public recipes: each works as written, or the message names what works instead."""

import json
import shlex
from pathlib import Path

import pytest

from kvasir.api.offline.vllm_args import settled, translated
from kvasir.api.offline.vllm_speculation import speculation
from kvasir.cli import serve
from kvasir.errors import ConfigError
from kvasir.speculation.router import load_drafter

RECIPES = [
    tuple(part.strip() for part in line.partition("=>")[::2])
    for line in (Path(__file__).parent / "vllm_recipes.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture
def start(kvasir, monkeypatch):
    """`kvasir serve ...` up to the model: returns what the command printed, and its settings if it would start."""
    seen = []

    def run(settings):
        serve.check_codec(settings.cache.kv_codec)
        serve.check_parsers(settings.server)
        seen.append(settings)

    monkeypatch.setattr(serve, "run", run)

    def of(*args):
        seen.clear()
        return kvasir("serve", *args), (seen or [None])[0]

    return of


@pytest.mark.parametrize(("command", "refused"), RECIPES, ids=[c[:60] for c, _ in RECIPES])
def test_recipes_start_or_name_what_works(command, refused, start):
    done, settings = start(*shlex.split(command))
    if refused:
        assert done.code == 2 and settings is None and refused in done.err
        return
    assert done.code == 0, done.err
    assert settings.model.model == shlex.split(command)[0]
    assert all("changes n" in line or "is read as" in line for line in done.err.splitlines())


def test_the_table_covers_usual_flags_and_both_answers():
    commands = " ".join(c for c, _ in RECIPES)
    for flag in (
        "--trust-remote-code --async-scheduling --language-model-only --tensor-parallel-size --enable-expert-parallel "
        "--limit-mm-per-prompt --kv-cache-dtype --max-num-batched-tokens --tool-call-parser --enable-auto-tool-choice "
        "--reasoning-parser --speculative-config --compilation-config --gpu-memory-utilization --swap-space "
        "--served-model-name --mm-encoder-tp-mode --data-parallel-size --block-size --no-enable-prefix-caching "
        "--chat-template --hf-overrides --load-format --quantization --dtype"
    ).split():
        assert flag in commands, flag
    assert len(RECIPES) >= 60 and 15 < sum(bool(refused) for _, refused in RECIPES) < 35


def test_what_recipes_ask_for_arrives(start):
    def of(*args):
        done, settings = start("m", *args)
        assert done.code == 0, done.err
        return settings

    assert of("--max-model-len", "128k").model.max_model_len == 128_000
    assert of("--max_model_len=16K").model.max_model_len == 16_384
    assert of("--max-model-len", "auto").cache.fit and of("--max-model-len=-1").cache.fit
    assert of("--generation-config", "vllm").model.generation_config == "none"
    assert of("--dtype", "half").model.dtype == "float16"
    assert of("--quantization", "modelopt_fp4").model.weights == "modelopt"
    assert of("--load-format", "fastsafetensors").model.load_format == "auto"
    assert of("--attention-backend", "FLASH_ATTN").runner.attention_backend == "auto"
    assert of("--attention-backend", "flash_attn").runner.attention_backend == "flash_attn"
    assert of("--mamba_ssm_cache_dtype", "bfloat16").cache.state_dtype == "bfloat16"
    named = of("--served-model-name", "a", "b", "c", "--seed", "1")
    assert (named.model.served_model_name, named.server.model_alias) == ("a", ("b", "c"))
    done, settings = start("--served-model-name", "a", "the-model")
    assert (settings.model.model, settings.server.model_alias) == ("the-model", ()), "the model may come last"


def test_speculation_is_read_where_a_drafter_is_the_same(start):
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    done, settings = start("m", "--speculative-config", given)
    assert settings.speculation.drafter == "ngram:max_match=3,min_match=1"
    assert settings.speculation.max_draft_tokens == 5 and "is read as --drafter ngram:max_match=3" in done.err
    assert start("m", f"--speculative-config={given}")[1] == settings
    dotted = ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=5",
              "--speculative-config.prompt_lookup_max", "3", "--speculative-config.prompt_lookup_min", "1"]  # fmt: skip
    assert start("m", *dotted)[1] == settings
    done, settings = start("m", "--speculative-config", '{"method": "mlp_speculator", "model": "x"}')
    assert settings.speculation.drafter == "" and "'mlp_speculator'" in done.err and "--drafter suffix" in done.err
    for wrong in ("{", "3", '{"method": "unheard-of"}'):
        done, settings = start("m", "--speculative-config", wrong)
        assert done.code == 2 and settings is None and "--drafter suffix" in done.err
    done, settings = start("m", "--drafter", "suffix", "--speculative-config", given)
    assert settings.speculation.drafter == "suffix", "what the command line names itself wins"


@pytest.mark.parametrize(
    ("given", "drafter"),
    [
        ({"method": "eagle3", "model": "x"}, "eagle:model=x,width=1,max_depth=3"),
        ({"method": "eagle", "model": "x"}, "eagle:model=x,width=1,max_depth=3"),
        (
            {"model": "some/EAGLE3-LLaMA3.1-Instruct-8B"},
            "eagle:model=some/EAGLE3-LLaMA3.1-Instruct-8B,width=1,max_depth=3",
        ),
        (
            {"model": "some/qwen3-8b-speculator.eagle3/"},
            "eagle:model=some/qwen3-8b-speculator.eagle3/,width=1,max_depth=3",
        ),
        ({"method": "medusa", "model": "x"}, "medusa:model=x"),
        ({"method": "dflash", "model": "x"}, "dflash:model=x,width=1,max_depth=3"),
        ({"model": "z-lab/Qwen3-8B-DFlash-b16"}, "dflash:model=z-lab/Qwen3-8B-DFlash-b16,width=1,max_depth=3"),
        ({"method": "draft_model", "model": "x"}, "draft_model:model=x,max_depth=3"),
        ({"model": "meta-llama/Llama-3.2-1B"}, "draft_model:model=meta-llama/Llama-3.2-1B,max_depth=3"),
        ({"method": "ngram", "prompt_lookup_max": 4}, "ngram:max_match=4"),
        ({"method": "suffix"}, "suffix"),
        ({"method": "mtp"}, "mtp:max_depth=3"),
        ({"method": "qwen3_next_mtp"}, "mtp:max_depth=3"),
    ],
    ids=str,
)
def test_methods_become_drafters(given, drafter, start):
    """The same on the command line and in Python; our parser takes the spec."""
    given = given | {"num_speculative_tokens": 3}
    assert settled({"speculative_config": given}) == {"drafter": drafter, "max_draft_tokens": 3}
    done, settings = start("m", "--speculative-config", json.dumps(given))
    assert settings.speculation.drafter == drafter and settings.speculation.max_draft_tokens == 3
    assert f"is read as --drafter {drafter}" in done.err
    load_drafter(drafter)


def test_keys_of_speculation_are_named(start):
    given = {"method": "suffix", "moe_backend": "triton", "quantization": None, "draft_tensor_parallel_size": 1}
    assert "change nothing here: moe_backend, draft_tensor_parallel_size." in speculation(given)[1]
    for wrong, words in (
        ({"method": "suffix", "num_speculative_token": 3}, "no key 'num_speculative_token'.*num_speculative_tokens"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "eagle3"}, "needs a model"),
        ({"method": "draft_model", "model": "x", "revision": "main"}, "revision.*folder"),
        ({"method": "suffix", "rejection_sample_method": "synthetic"}, "replay:accept"),
    ):
        with pytest.raises(ConfigError, match=words):
            speculation(wrong)
        done, settings = start("m", "--speculative-config", json.dumps(wrong))
        assert done.code == 2 and settings is None


def test_the_same_words_in_python():
    assert settled({"generation_config": "vllm", "load_format": "fastsafetensors", "max_model_len": -1}) == {
        "generation_config": "none",
        "fit": True,
    }
    drafts = {"method": "suffix", "num_speculative_tokens": 4}
    assert settled({"speculative_config": drafts, "seed": 1}) == {"drafter": "suffix", "max_draft_tokens": 4, "seed": 1}
    with pytest.raises(ConfigError, match="--drafter"):
        settled({"speculative_config": {"method": "unheard-of"}})


def test_a_flag_without_its_value_is_left_for_the_parser():
    for flag in ("--max-model-len", "--load-format", "--swap-space"):
        assert translated(["m", flag], {"--max-model-len", "--load-format"})[0] == ["m", flag]
    assert speculation({"method": "mlp_speculator"})[0] == {}
