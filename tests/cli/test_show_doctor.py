"""``kvasir show`` and ``kvasir doctor``: their numbers, and their JSON for programs."""

import json
import re
from pathlib import Path

import pytest
import torch

from kvasir import LLM
from kvasir.bench.workloads import SHAPES
from kvasir.cli.doctor import _attention, other_methods
from kvasir.technique import names

ROOT = Path(__file__).parents[2]
GEMMA = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    hidden_size=3840,
    intermediate_size=15360,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=262208,
    max_position_embeddings=131072,
    sliding_window=1024,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
)
MOE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
GIB = 1 << 30


@pytest.fixture
def shape(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def facts(kvasir, *args):
    done = kvasir("show", *args, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_embedded_model(kvasir):
    found = facts(kvasir)
    assert found["model"] == "embedded" and 16e6 < found["parameters"] < 17e6
    assert found["max_model_len"] == max(map(int, next(iter(found["fits"].values()))))
    assert len(found["fits"]) >= 4, "this machine and common GPUs"
    done = kvasir("show")
    assert (
        done.code == 0 and "embedded (qwen3, 16.1M parameters)" in done.out and "H200" in done.out and "10" in done.out
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is shown instead of the CPU")
def test_what_tiers_would_hold(kvasir, monkeypatch):
    monkeypatch.setattr("kvasir.engine.start.tier_choice.free_host_memory", lambda: 4 << 30)
    host, disk = facts(kvasir)["tiers"]
    assert host.startswith("host: 1.00 GiB, a quarter of free memory, holds ") and "--kv-disk on a CPU" in host
    assert "--kv-host-bytes 1073741824" in host and "PATH,bytes=107374182400" in disk


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is shown instead of the CPU")
@pytest.mark.parametrize("size", [None, 1 << 27])
def test_a_cpu_holds_what_the_server_holds(kvasir, size):
    """The sequences that are shown are those of the pool that the engine makes, in the type that it computes in."""
    found = facts(kvasir, *([] if size is None else ["--cpu-cache-bytes", str(size)]))
    length = found["max_model_len"]
    shown = next(iter(found["fits"].values()))[str(length)]
    with LLM(**({} if size is None else {"cpu_cache_bytes": size})) as llm:
        info = llm.engine.info
        assert shown == info.kv_capacity_tokens // length and 0 < shown < 20
    assert found["dtype"] == "float32" and set(found["dtypes"].values()) == {"float32", "bfloat16"}
    assert f": {shown:,} sequences" in found["advice"][0]


def test_llama_8b_by_hand(kvasir, shape):
    found = facts(kvasir, shape(SHAPES["llama-8b"]), "--memory", "80")
    assert found["parameters"] == 8_030_261_248
    assert found["cache_groups"] == [
        {"name": "full", "layers": 32, "window": None, "kv_bytes_per_token": 2 * 8 * 128 * 2 * 32}
    ]
    pool = 0.9 * 80 * GIB - 2 * 8_030_261_248
    assert found["fits"] == {
        "80 GiB": {n: int(pool // (131072 * int(n))) for n in ("1024", "4096", "16384", "32768", "131072")}
    }
    assert found["layers"] == ["0-31: 32 query / 8 KV heads of 128; FFN 14336"]
    assert (
        facts(kvasir, shape(SHAPES["llama-8b"]), "--memory", "80", "--dtype", "float32")["weight_bytes"]
        == 2 * found["weight_bytes"]
    )


def test_codecs_of_llama_8b_by_hand(kvasir, shape):
    found = facts(kvasir, shape(SHAPES["llama-8b"]), "--memory", "80")["codecs"]
    heads = 2 * 8 * 32
    bits = {"plain": 16, "int8": 8.25, "fp8": 8.25, "nvfp4": 4.5, "int4": 4.25, "int4_bdr": 4.25}
    assert {name: found[name]["kv_bytes_per_token"] for name in bits} == {
        name: heads * 128 * size / 8 for name, size in bits.items()
    }
    assert found["int4_bdr"]["ratio"] == 64 / 17 and found["plain"]["ratio"] == 1 and list(found)[0] == "plain"
    pool = 0.9 * 80 * GIB - 2 * 8_030_261_248
    assert found["int4_bdr"]["fits"]["80 GiB"]["16384"] == int(pool // (34816 * 16384))
    text = kvasir("show", shape(SHAPES["llama-8b"]), "--memory", "80").out
    (line,) = [line for line in text.splitlines() if line.startswith("int4_bdr")]
    assert (
        line.split() == ["int4_bdr", "34,816", "3.76x", str(int(pool // (34816 * 16384)))]
        and "sequences of 16,384 tokens" in text
    )


def test_codecs_with_windows_and_odd_heads(kvasir, shape):
    found = facts(kvasir, shape(GEMMA), "--memory", "80")
    share = 1 / found["codecs"]["fp8"]["ratio"]
    sizes = {g["name"]: g["kv_bytes_per_token"] * share for g in found["cache_groups"]}
    pool = 0.9 * 80 * GIB - found["weight_bytes"]
    assert found["codecs"]["fp8"]["fits"]["80 GiB"]["131072"] == int(
        pool // (sizes["full"] * 131072 + sizes["window-1024"] * 1024)
    )
    odd = shape({**SHAPES["llama-8b"], "head_dim": 80})
    assert (
        "multiple of 32" in facts(kvasir, odd)["codecs"]["nvfp4"]["cannot"]
        and "nvfp4: 'nvfp4' has blocks" in kvasir("show", odd).out
    )


def test_windows_keep_their_window_only(kvasir, shape):
    found = facts(kvasir, shape(GEMMA), "--memory", "80")
    assert {g["name"]: (g["layers"], g["window"]) for g in found["cache_groups"]} == {
        "window-1024": (40, 1024),
        "full": (8, None),
    }
    pool = 0.9 * 80 * GIB - found["weight_bytes"]
    a_token = {g["name"]: g["kv_bytes_per_token"] for g in found["cache_groups"]}
    assert found["fits"]["80 GiB"]["131072"] == int(pool // (a_token["full"] * 131072 + a_token["window-1024"] * 1024))
    assert len(found["layers"]) == 2, "two kinds of layer, not a line for each run"
    text = kvasir("show", shape(GEMMA)).out
    assert "for the last 1,024 tokens" in text and "window 1,024" in text and "none" in text


def test_the_command_to_go_on_with(kvasir, shape):
    """As it is where the whole context fits, with a smaller cache or a shorter context where not."""
    folder = shape(SHAPES["llama-8b"])

    def advice(memory, *args):
        return facts(kvasir, folder, "--memory", memory, *args)["advice"]

    assert advice("80") == [f"kvasir serve {folder}: 3 sequences of the whole context at once"]
    tight = advice("24")
    assert [line.partition(":")[0] for line in tight][-1] == f"kvasir serve {folder} --max-model-len 32768"
    assert f"kvasir serve {folder} --kv-codec int4_bdr: 1 sequences of the whole context at once" in tight
    assert len(advice("16.9")) == 1 and "--fit" in advice("16.7")[0]
    assert "nothing fits: the weights alone need 14.96 GiB" in advice("16")[0]
    assert "--dtype float32" in advice("80", "--dtype", "float32")[0]
    assert f"kvasir serve {folder}: 3 sequences" in kvasir("show", folder, "--memory", "80").out
    assert facts(kvasir)["advice"][0].startswith("kvasir serve: ")


def test_experts(kvasir, shape):
    found = facts(kvasir, shape(MOE), "--memory", "80")
    assert 30e9 < found["parameters"] < 31e9 and 2.7e9 < found["active_parameters"] < 3.4e9
    assert "8 of 128 experts" in found["layers"][0]
    assert "active per token" in kvasir("show", shape(MOE), "--memory", "80").out


@pytest.mark.parametrize(
    "config, message",
    [
        ({**MOE, "model_type": "qwen9_moe"}, "model_type 'qwen9_moe' is not served"),
        ({**MOE, "quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({k: v for k, v in MOE.items() if k != "hidden_size"}, "hidden_size"),
        ([], "JSON object"),
    ],
)
def test_what_is_not_served_is_said(kvasir, shape, config, message):
    done = kvasir("show", shape(config))
    assert done.code == 2 and message in done.err


def test_no_model_there(kvasir, tmp_path):
    assert "no config.json (it is empty)" in kvasir("show", tmp_path).err
    assert "no such folder" in kvasir("show", "/no/such/folder").err


# --------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_for_programs(kvasir):
    done = kvasir("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert {
        "kvasir",
        "python",
        "torch",
        "cpu",
        "gpus",
        "packages",
        "attention",
        "attention_chosen",
        "codecs",
        "advice",
    } <= set(found)
    assert found["attention"][found["attention_chosen"]] == [] and "plain" in found["codecs"]
    assert "suffix" in found["drafters"] and "majority" in found["strategies"] and "cost" in found["routers"]
    assert set(found["scheduling_policies"]) == {"affinity", "fair", "fcfs", "priority", "shortest"}


def test_doctor_says_what_small_steps_run_on(kvasir, monkeypatch):
    from kvasir.kernels.native import library

    found = json.loads(kvasir("doctor", "--json").out)["native_kernels"]
    assert found["ready"] == (library.native().library is not None) and found["reason"]
    monkeypatch.setattr(library, "native", lambda: library.Native(None, "no C compiler"))
    assert "no: no C compiler" in " ".join(kvasir("doctor").out.split())


def test_doctor_says_why_something_falls_back(kvasir):
    import torch

    done = kvasir("doctor")
    assert done.code == 0 and "(chosen)," in done.out
    if not torch.cuda.is_available():
        assert (
            "attention triton" in done.out
            and "no: needs a CUDA GPU" in " ".join(done.out.split())
            and "note" in done.out
        )


def test_doctor_names_what_is_missing(kvasir, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert "not installed: plots" in " ".join(kvasir("doctor").out.split())


def test_doctor_says_what_must_be_named():
    facts = {
        "attention": {"b": ""},
        "attention_exact": {"b": "no"},
        "attention_only_named": {"b": "why"},
        "attention_chosen": 0,
        "attention_why": "",
    }
    assert _attention(facts, "b") == "ready, only when named: why; not for batch_invariant"


def test_doctor_lists_every_kind_of_method(kvasir):
    """Each folder of methods is named with all its files."""
    found, text = json.loads(kvasir("doctor", "--json").out), kvasir("doctor").out
    for kind, package in other_methods().items():
        assert found[kind] == names(package) and found[kind], kind
        assert kind.replace("_", " ") in text
    shown = kvasir("convert", "--help").out
    assert all(name in shown for name in found["converters"])
    assert "chain" in found["tasks"] and "pack" in found["converters"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies by Triton")
def test_a_cpu_has_no_products_of_triton(kvasir):
    (line,) = [line for line in kvasir("doctor").out.splitlines() if line.startswith("products triton")]
    assert "ready" not in line and "C kernels and torch" in line


def test_doctor_knows_every_seam_that_authors_are_told_of(kvasir):
    """Whatever file a reader of the page adds, doctor lists it, as the page says."""
    page = (ROOT / "docs" / "adding-a-technique.md").read_text()
    folders = re.findall(r"^\|[^|]+\| `[^`]+` \| `([\w/]+)/<\w+>\.py` \|", page, re.M)
    listed = json.dumps(json.loads(kvasir("doctor", "--json").out))
    assert len(folders) > 15
    for folder in folders:
        for name in names(("" if folder.startswith("kvasir_lab") else "kvasir.") + folder.replace("/", ".")):
            assert f'"{name}"' in listed, f"{folder}/{name}"
