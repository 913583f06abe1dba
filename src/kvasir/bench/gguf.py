"""Write a checkpoint of ours as a GGUF file, so that llama.cpp runs on the same weights. For dense Llama- and
Qwen3-shaped models.

The file has no vocabulary, since the benchmark exchanges token ids. Layout and names are those of the ``gguf`` package,
which writes the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.layers.spec import RopeSpec
from kvasir.models import checkpoint
from kvasir.models.families import build_spec

# Architectures by our name -> the package's name.
ARCHITECTURES = {"LlamaForCausalLM": "LLAMA", "Qwen3ForCausalLM": "QWEN3"}
FILE_TYPES = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
# Settings of a config that this writer does not support.
SPECIAL = ("rope_scaling", "sliding_window", "attention_bias", "mlp_bias")


def write(folder: Path, file: Path, file_type: str) -> None:
    """Write ``folder``'s weights to ``file``.

    File types f32 and bf16 keep the values of a bf16 checkpoint exactly; q8_0 and q4_0 round matrices to 8 and 4
    bits in blocks of 32. Norms are always f32. Raises ConfigError for a model that cannot be written.
    """
    import gguf
    import torch

    from kvasir.models.loader import read_tensors

    config = checkpoint.read_config(folder)
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ConfigError(f"no GGUF of a {name}; there are {', '.join(ARCHITECTURES)}")
    if file_type not in FILE_TYPES:
        raise ConfigError(f"no GGUF file type '{file_type}'; there are {', '.join(FILE_TYPES)}")
    if odd := [key for key in SPECIAL if config.get(key)]:
        raise ConfigError(f"no GGUF of a model with {odd[0]}={config[odd[0]]!r}")
    rope = build_spec(config).layers[0].rope
    if rope is None or rope.kind != "default":
        raise ConfigError(f"no GGUF of a model with rope_type '{'none' if rope is None else rope.kind}'")
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[name]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    matrices = getattr(gguf.GGMLQuantizationType, file_type.upper())
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, config, rope, gguf.LlamaFileType[FILE_TYPES[file_type]])
    for key, tensor in read_tensors(folder):
        stem, _, end = key.rpartition(".")
        if not (target := names.get_name(stem)):
            raise ConfigError(f"llama.cpp has no tensor for {key}")
        if name == "LlamaForCausalLM" and stem.endswith(("q_proj", "k_proj")):
            tensor = _interleaved(
                tensor, config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            )
        kind = matrices if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            f"{target}.{end}", gguf.quants.quantize(tensor.to(torch.float32).numpy(), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any], rope: RopeSpec, file_type: int) -> None:
    heads, dim = config["num_attention_heads"], rope.head_dim
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows [heads x D, E] with the two halves of each head interleaved.

    llama.cpp rotates neighbours for Llama, checkpoints rotate halves.
    """
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
