"""Small GGUF files for tests, written by the ``gguf`` package, and the same models plain, as ``gguf.quants`` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints

SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             num_hidden_layers=2, vocab_size=96, max_position_embeddings=256, tie_word_embeddings=False)  # fmt: skip
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}


def blocks(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks [rows, bytes] whose numbers have about the size of weights."""
    import gguf

    per, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = inputs // per
    found = rng.integers(0, 256, (rows, count, size), dtype=np.uint8)
    scale = (rng.uniform(0.5, 1.5, (rows, count, 2)) * inputs**-0.5).astype(np.float32)

    def half(at: int, numbers: np.ndarray) -> None:
        found[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)

    if kind == "Q4_K":
        half(0, scale[..., 0] / 200)
        half(2, scale[..., 1] / 30)
    elif kind == "Q6_K":
        half(208, scale[..., 0] / 1500)
    else:
        half(0, scale[..., 0] / {"Q8_0": 70, "Q5_0": 9, "Q4_0": 5}[kind])
    return found.reshape(rows, count * size)


def paired(matrix: Any, heads: int) -> Any:
    """Rows as llama.cpp stores those of q and k: the halves of each head in turn."""
    parts = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
    return parts.swapaxes(1, 2).reshape(matrix.shape)


def unpaired(matrix: Any, heads: int) -> Any:
    parts = matrix.reshape(heads, matrix.shape[0] // heads // 2, 2, *matrix.shape[1:])
    return parts.swapaxes(1, 2).reshape(matrix.shape)


def write(folder: Path, arch: str = "llama", kinds: Any = "Q8_0", metadata: dict | None = None, **changes: Any):
    """A GGUF file and a plain folder in fp32 with the same weights. ``kinds``: the type of all matrices, or a function
    of a name there. ``metadata``: more fields. ``changes``: of config.json."""
    import gguf

    shape = SHAPE | changes
    plain = checkpoints.write(folder / "plain", arch, **shape)
    tensors = load_file(plain / "model.safetensors")
    rng, file = np.random.default_rng(0), folder / "model.gguf"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[arch]], shape["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, arch)
    describe(writer, shape, metadata or {})
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        target = f"{names.get_name(stem)}.{end}"
        kind = "F32" if tensor.dim() == 1 else kinds if isinstance(kinds, str) else kinds(target)
        turned = arch == "llama" and stem.endswith(("q_proj", "k_proj"))
        heads = shape["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
        if kind in ("F32", "F16", "BF16"):
            numbers = tensor.float().numpy()
            data = gguf.quants.quantize(paired(numbers, heads) if turned else numbers, gguf.GGMLQuantizationType[kind])
        else:
            data = blocks(kind, *tensor.shape, rng)
        wide = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        wide = unpaired(wide, heads) if turned else wide
        tensors[name] = torch.from_numpy(np.ascontiguousarray(wide, np.float32)).view(tensor.shape)
        writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return file, plain


def describe(writer: Any, shape: dict[str, Any], metadata: dict[str, Any]) -> None:
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(shape.get("rope_theta", 10000.0))
    add(writer, metadata)


def add(writer: Any, metadata: dict[str, Any]) -> None:
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](name, value)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
