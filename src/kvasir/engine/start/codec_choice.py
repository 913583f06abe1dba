"""Which codec the cache has: the one that was named, by our name or vLLM's, and whether our kernels can read it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvasir import technique
from kvasir.config import CacheConfig
from kvasir.errors import ConfigError
from kvasir.kv.codec import CODECS, Codec, planes_of
from kvasir.types import CacheRow

VLLM_TYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16}
VLLM_CODECS = {"auto": "plain", "fp8_e4m3": "fp8"}


def choose_codec(spec: str, dtype: torch.dtype) -> Codec:
    """The codec of this name, which may be vLLM's name of a type. Raises ConfigError for an unknown one, and for a type
    that the cache will not have."""
    kind = VLLM_TYPES.get(spec)
    if kind is not None and kind != dtype:
        raise ConfigError(
            f"kv_codec={spec}, but the model runs in {str(dtype).removeprefix('torch.')}, and an uncompressed cache "
            "has its type. "
            f"Use --kv-codec plain, or --dtype {str(kind).removeprefix('torch.')}."
        )
    return technique.load(CODECS, CacheConfig().kv_codec if kind is not None else VLLM_CODECS.get(spec, spec), Codec)


def check_layout(codec: Codec, rows: Iterable[CacheRow], dtype: torch.dtype) -> None:
    """Check that a codec which takes one of our ``kernel`` names has our planes: our kernels will read them. Raises
    ConfigError."""
    known = () if codec.ours else (technique.load(CODECS, name, Codec) for name in technique.own(CODECS))
    ours = next((c for c in known if c.kernel == codec.kernel), None)
    for row in rows if ours is not None else ():
        stored, read = (
            [f"{p.name}: {p.width} x {str(p.dtype).removeprefix('torch.')}" for p in planes_of(c, row, dtype)]
            for c in (codec, ours)
        )
        if stored != read:
            raise ConfigError(
                f"kv_codec '{codec.name}' says kernel = '{codec.kernel}', by which a head of {row.key_dim} is read as "
                f"{', '.join(read)}, but it stores {', '.join(stored)}. Give this layout a name of its own, such as "
                f"kernel = '{codec.name}'."
            )
