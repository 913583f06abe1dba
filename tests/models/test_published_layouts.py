"""Quantised checkpoints as their makers publish them: the fields of their config.json, the shapes and types of their
tensors, and logits equal to those of the same weights in fp32."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.loader import load_model
from kvasir.models.quantisation import reader_of
from tests.models import packed_checkpoints as packed
from tests.models.test_parity import Paged
from tests.quantised import by_channel, by_tensor

GROUP = packed.GROUP


def w8a8(name, n, k):
    """RedHat's quantized.w8a8: int8 [N, K], scales bf16 [N, 1]."""
    codes, scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), ((torch.rand(n, 1) + 0.5) * 2e-3).bfloat16()
    return packed._named(name, {"weight": codes, "weight_scale": scales}), codes.float() * scales.float()


def fp8(name, n, k, how, shape=None, more=()):
    codes, scale, values = how(torch.randn(n, k) * k**-0.5)
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale if shape is None else scale.view(shape)}
    return packed._named(name, tensors | {key: torch.tensor(0.5) for key in more}), values


def gptq(name, n, k, **options):
    """AutoGPTQ's: a bias of zeros for every matrix."""
    tensors, matrix = packed.gptq(name, n, k, **options)
    return tensors | {f"{name}.bias": torch.zeros(n, dtype=torch.float16)}, matrix


def redhat(kind, weights, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
            "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None,
            "quantization_status": "compressed"} | more  # fmt: skip


def args(bits, kind, strategy, size=None, **more):
    found = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": size, "num_bits": bits,
             "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True}  # fmt: skip
    return found | {"type": kind} | more


TOKEN = {"dynamic": True, "strategy": "token", "observer": None}
GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": GROUP, "model_seqlen": None,
    "modules_in_block_to_quantize": None, "quant_method": "gptq", "sym": True, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
AWQ = {"bits": 4, "group_size": GROUP, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
       "zero_point": True}  # fmt: skip
ROUND = {"autoround_version": "0.5.1", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int",
         "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}, "group_size": GROUP, "iters": 200,
         "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True}  # fmt: skip
NVFP4 = args(4, "float", "tensor_group", 16, observer="static_minmax")
OPT = {"producer": {"name": "modelopt", "version": "0.23.0"},
       "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}  # fmt: skip
LAYOUTS = {
    "Qwen2.5 AWQ": (packed.awq, AWQ, {"variant": "qwen2"}),
    "Qwen2.5 GPTQ-Int4": (packed.gptq, GPTQ, {"variant": "qwen2"}),
    "AutoGPTQ with biases": (gptq, GPTQ, {}),
    "GPTQ-Int8": (packed.gptq, GPTQ | {"bits": 8}, {"bits": 8}),
    "GPTQModel": (packed.gptq, GPTQ | {"dynamic": {}, "checkpoint_format": "gptq", "pack_dtype": "int32",
                                       "meta": {"quantizer": ["gptqmodel:2.0"]}, "lm_head": False}, {}),
    "AutoRound": (packed.gptq, ROUND, {}),
    "AutoRound as AWQ": (packed.awq, ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, {}),
    "w4a16": (packed.compressed, redhat("pack-quantized", args(4, "int", "group", GROUP, actorder="weight")), {}),
    "w8a8": (w8a8, redhat("int-quantized", args(8, "int", "channel"), args(8, "int", "token") | TOKEN), {}),
    "FP8-dynamic": (fp8, redhat("float-quantized", args(8, "float", "channel"), args(8, "float", "token") | TOKEN),
                    {"how": by_channel}),
    "FP8 static": (fp8, redhat("float-quantized", args(8, "float", "tensor"), args(8, "float", "tensor")),
                   {"how": by_tensor, "shape": (1,), "more": ("input_scale",)}),
    "NVFP4": (packed.modelopt, redhat("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}), {"inverse": True}),
    "modelopt NVFP4": (packed.modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
                                         "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {}),
    "modelopt FP8": (fp8, OPT, {"how": by_tensor, "more": ("input_scale",)}),
}  # fmt: skip


def write(tmp_path, name):
    pack, config, options = LAYOUTS[name]
    folder, plain = packed.write(tmp_path, pack, config, **options)
    if name == "modelopt FP8":  # in a file of its own
        about = json.loads((folder / "config.json").read_text())
        (folder / "hf_quant_config.json").write_text(json.dumps(about.pop("quantization_config")))
        (folder / "config.json").write_text(json.dumps(about))
    return folder, plain


def load(folder):
    return load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32)


QUICK = "Qwen2.5 AWQ", "AutoGPTQ with biases", "AutoRound", "w8a8", "modelopt FP8"  # in every commit


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in LAYOUTS])
def test_logits_are_those_of_the_dequantised_model(name, tmp_path):
    folder, plain = write(tmp_path, name)
    assert all(w.format.name != "plain" for b in load(folder).blocks for w in (b.mixer.qkv.weight, b.ffn.down.weight))
    for got, want in zip(Paged(folder).run(lambda i: 50), Paged(plain).run(lambda i: 50)):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_a_bias_that_is_not_zero_is_refused(tmp_path):
    folder, _ = write(tmp_path, "AutoGPTQ with biases")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.bias"] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="down_proj.bias' is a bias that this model has no place for"):
        load(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"packing_format": "auto_round:exllamav2"}, "packing_format 'auto_round:exllamav2'"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}}, "extra_config of 'model.layers.0.mlp.up_proj'"),
    ],
)
def test_what_auto_round_packs_otherwise_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        reader_of({"quantization_config": ROUND | changes})
