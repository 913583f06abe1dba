"""GGUF files (llama.cpp): their metadata and tensors, under the names that a model folder has. Needs the ``gguf``
package, and no torch.

Llama's q and k are stored as llama.cpp rotates them, neighbours together: row 2 i + half of a head is row half * D / 2
+ i of ours. Their shape here is [heads, D / 2, 2, ...], so that a loader can put the rows back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.errors import ConfigError, install

if TYPE_CHECKING:
    from kvasir.models.fill import Stored

PLAIN_TYPES = ("F32", "F16", "BF16")  # as safetensors calls them, too
PAIRED = (".q_proj", ".k_proj")
FREQUENCIES = "rope_freqs.weight"
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)$")


@dataclass(frozen=True)
class Blocks:
    """A type of blocks: their inputs and bytes, and which bytes fill which plane of the format that holds them."""

    inputs: int
    num_bytes: int
    planes: dict[str, slice]


BLOCKS = {
    "Q8_0": Blocks(32, 34, {"scale": slice(0, 2), "weight": slice(2, 34)}),
    "Q5_0": Blocks(32, 22, {"scale": slice(0, 2), "weight": slice(2, 22)}),
    "Q4_0": Blocks(32, 18, {"scale": slice(0, 2), "weight": slice(2, 18)}),
    "Q4_K": Blocks(256, 144, {"factor": slice(0, 4), "scale": slice(4, 16), "weight": slice(16, 144)}),
    "Q6_K": Blocks(
        256,
        210,
        {"weight": slice(0, 128), "high": slice(128, 192), "scale": slice(192, 208), "factor": slice(208, 210)},
    ),
}


class GGUFFile:
    """An open file. Raises ConfigError where it cannot be read. ``fields``: its metadata."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as e:
            raise ConfigError(f"{file}: a GGUF file is read by the gguf package: {install('gguf')}") from e
        self.file = file
        try:
            self._reader = gguf.GGUFReader(file)
        except (ValueError, OSError, IndexError, KeyError, OverflowError) as e:
            raise ConfigError(f"{file} cannot be read as a GGUF file: {str(e)[:200] or type(e).__name__}") from e

    def field(self, name: str, default: Any = None) -> Any:
        """A number, text or list of the metadata."""
        found = self._reader.fields.get(name)
        return default if found is None else found.contents()

    def names(self, prefix: str) -> list[str]:
        """The fields whose names begin so."""
        return [name for name in self._reader.fields if name.startswith(prefix)]

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """Name here, type, shape [outputs, inputs], first byte and bytes of every tensor."""
        for tensor in self._reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            yield (
                self.name_of(tensor.name),
                tensor.tensor_type.name,
                shape,
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )

    def name_of(self, name: str) -> str:
        """A tensor's name in a model folder. Raises ConfigError for one that no served model has."""
        stem, _, end = name.rpartition(".")
        if name == FREQUENCIES:
            return name
        found = LAYER.match(stem)
        if found and found[2] in IN_LAYER:
            return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.{end}"
        if stem in NAMES:
            return f"{NAMES[stem]}.{end}"
        raise ConfigError(f"{self.file}: tensor '{name}' is of no model that is served from GGUF")

    def array(self, name: str) -> Any:
        """A plain tensor's numbers, as numpy has them."""
        return next(tensor.data for tensor in self._reader.tensors if tensor.name == name)


def headers(file: Path, heads: dict[str, int]) -> list[Stored]:
    """The tensors of a file as a loader takes them. Rows of blocks are bytes [outputs, blocks, bytes of one].

    ``heads``: how many each of q_proj and k_proj has where their rows are paired; empty: they are not."""
    from kvasir.models.fill import Stored

    found = []
    for name, kind, shape, offset, num_bytes in GGUFFile(file).tensors():
        if name == FREQUENCIES:  # the config says it
            continue
        if kind not in PLAIN_TYPES:
            blocks = BLOCKS[kind]
            shape, kind = (*shape[:-1], shape[-1] // blocks.inputs, blocks.num_bytes), "U8"
        module = name.rpartition(".")[0]
        if heads and module.endswith(PAIRED):
            count = heads[module.rpartition(".")[2]]
            shape = (count, shape[0] // count // 2, 2, *shape[1:])
        found.append(Stored(name, file, kind, shape, num_bytes, offset))
    return found
