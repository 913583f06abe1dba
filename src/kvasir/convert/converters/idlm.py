"""Make a Qwen3 checkpoint of a released I-DLM model (arXiv 2604.11035), which is stored as `sdar`. Exact.

The class behind `sdar` is Qwen3's, with another attention mask in training. So no tensor changes: config.json says
qwen3, and `kvasir.json` holds the mask's id, which is never drawn, and the stride, for ``--drafter idlm``. Models of
SDAR itself have the same layout, but see a whole block at once and predict a mask's own token: their drafts would be
useless, and where config.json says so they are refused. It costs nothing at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    from kvasir.convert.converter import Tensors

RELEASED = "sdar"
# Fields of the released config that Qwen3 does not have.
OTHER_FIELDS = ("auto_map", "block_size", "mask_token_id", "fuse_cross_entropy", "use_regular_causal")


@dataclass(frozen=True)
class Config:
    """``stride``: tokens of a forward in which all drafts are accepted (0: from the config's block_size).
    ``mask_token_id``: -1 for the config's."""

    stride: int = 0
    mask_token_id: int = -1

    def __post_init__(self) -> None:
        if self.stride and not 2 <= self.stride <= 16:
            raise ConfigError(f"idlm:stride={self.stride}: must be from 2 to 16, or 0 for the config's block_size + 1")


class ToQwen3(Converter):
    exact = True
    sidecar: dict[str, Any]

    def as_served(self, config: dict[str, Any]) -> dict[str, Any]:
        if config.get("model_type") != RELEASED:
            raise ConfigError(
                f"config.json: model_type is {config.get('model_type')!r}; idlm converts '{RELEASED}', the layout of "
                "released I-DLM models. `kvasir train idlm` makes one of another model."
            )
        if config.get("use_regular_causal", True) is not True:
            raise ConfigError(
                "config.json: use_regular_causal is false, so a block of this model sees itself whole: it is no I-DLM"
            )
        block = config.get("block_size")
        stride = self.config.stride or (block + 1 if _is_count(block) else 0)
        if not 2 <= stride <= 16:
            raise ConfigError(f"config.json: block_size is {block!r}: give the trained stride, idlm:stride=4")
        given = config.get("mask_token_id")
        mask = self.config.mask_token_id if self.config.mask_token_id >= 0 else given
        size = config.get("vocab_size")
        if not _is_count(mask) or (_is_count(size) and mask >= size):
            raise ConfigError(
                f"config.json: mask_token_id is {mask!r}, expected an id below vocab_size {size}: give the mask's "
                "token, idlm:mask_token_id=ID"
            )
        self.sidecar = {"kind": "idlm", "mask_token_id": mask, "stride": stride}
        kept = {name: value for name, value in config.items() if name not in OTHER_FIELDS}
        return kept | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        return tensors


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
