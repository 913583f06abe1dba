"""Stand-in for the package that writes GGUF files. It writes the calls that it gets as JSON."""

import enum
import json
from types import SimpleNamespace

MODEL_ARCH = enum.Enum("MODEL_ARCH", "LLAMA QWEN3")
MODEL_ARCH_NAMES = {MODEL_ARCH.LLAMA: "llama", MODEL_ARCH.QWEN3: "qwen3"}
GGMLQuantizationType = enum.IntEnum("GGMLQuantizationType", {"F32": 0, "Q8_0": 8, "BF16": 30})
LlamaFileType = enum.IntEnum("LlamaFileType", {"ALL_F32": 0, "MOSTLY_Q8_0": 7, "MOSTLY_BF16": 32})
quants = SimpleNamespace(quantize=lambda values, kind: values)


def get_tensor_name_map(architecture, layers):
    known = {"model.embed_tokens", "model.norm", "lm_head"}
    parts = (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
    known |= {f"model.layers.{i}.{p}" for i in range(layers) for p in parts}
    return SimpleNamespace(get_name=lambda stem: stem if stem in known else None)


class GGUFWriter:
    def __init__(self, path, architecture):
        self.path, self.found = path, {"architecture": architecture, "tensors": {}}

    def add_tensor(self, name, values, raw_dtype):
        assert values.dtype == "float32" and values.flags.c_contiguous
        self.found["tensors"][name] = {
            "shape": list(values.shape),
            "type": raw_dtype.name,
            "sum": float(values.sum()),
            "column": values.reshape(values.shape[0], -1)[:, 0].tolist(),
        }

    def __getattr__(self, name):
        if name.startswith("add_"):
            return lambda value: self.found.__setitem__(name[4:], value)
        if name.startswith("write_"):
            return lambda: None
        raise AttributeError(name)

    def close(self):
        self.path.write_text(json.dumps(self.found))
