"""The seam of offline conversions: a stream of stored tensors in, a stream out, and edits to config.json.

A converter is one module in `kvasir/convert/converters/`, chosen as ``name:key=value``. It holds only the tensors that
it works on, so a checkpoint larger than the memory can be converted. ``exact`` promises that the converted model
computes the same function.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.errors import ConfigError
from kvasir.models.families import build_spec, find_family
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import view_of
from kvasir.technique import Technique, load

if TYPE_CHECKING:
    import torch

    from kvasir.convert.calibrate import Run

    Tensors = Iterator[tuple[str, torch.Tensor]]  # stored name, values as stored (CPU)

PACKAGE = "kvasir.convert.converters"
# Bytes of a shard at most: the size that the hub and transformers take for their own shards.
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """The checkpoint that a converter works on: its folder, its config.json, and the layers of that config."""

    path: Path
    config: dict[str, Any]
    spec: ModelSpec

    @classmethod
    def of(cls, path: Path, config: dict[str, Any]) -> Source:
        """Read the layers from ``config``. Raises ConfigError when the engine does not serve such a config."""
        return cls(path, config, build_spec(config))

    def stored(self, slot: str) -> str:
        """The checkpoint's name of one of our weight slots. Raises ConfigError if only a part of a tensor fills it.

        ``layers.0.mixer.q.weight`` -> ``model.layers.0.self_attn.q_proj.weight``
        """
        view = view_of(find_family(self.spec.family).stored(slot, self.spec))
        if view.index or view.transposed:
            raise ConfigError(
                f"'{slot}' is a part of '{view.name}' in a checkpoint of {self.spec.family}, and this converter works "
                "on whole tensors. Use a checkpoint that stores it by itself."
            )
        return self.own_name(view.name)

    def own_name(self, name: str) -> str:
        """The checkpoint's name of a tensor, by the family's, which may have another prefix."""
        return self._names.get(name, name)

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """The checkpoint's own names by the family's, which may have another prefix."""
        from kvasir.models.loader import read_headers, renamed

        prefixes = getattr(find_family(self.spec.family), "RENAMED", {})
        return {renamed(t.name, prefixes): t.name for t in read_headers(self.path)} if prefixes else {}


class Converter(Technique):
    """A rewriting of a checkpoint.

    ``exact``: the result computes the same function as the source. ``result``: what it is, where it is another one.
    ``packed``: the result's shards are packed. ``files``: of a result that is no model, its weights and description.
    ``shard_bytes``: most bytes of weights in a shard, before packing. ``sidecar``: what the result's kvasir.json holds,
    known after `check`. ``calibration``: sites of every layer that it wants sums of (`kvasir.convert.calibrate`); such
    a converter gets `calibrate`, and its option ``texts`` names a file of texts to use instead of the default ones.
    ``record``: what conversion.json says about a calibration.
    """

    packed = False
    files: tuple[str, str] | None = None
    calibration: tuple[str, ...] = ()
    record: dict[str, Any] = {}
    result = ""
    shard_bytes = SHARD_BYTES
    sidecar: dict[str, Any] | None = None

    def as_served(self, config: dict[str, Any]) -> dict[str, Any]:
        """The source's config.json as the engine reads it: for layouts that are not served as they are. Raises
        ConfigError."""
        return config

    def check(self, source: Source) -> None:
        """Raise ConfigError when this converter cannot take ``source``. Called before anything is read or written."""

    def calibrate(self, source: Source, run: Run) -> None:
        """Learn what the result needs from texts: called between `check` and `tensors` where there are sites."""
        raise NotImplementedError

    def edit_config(self, source: Source) -> dict[str, Any]:
        """The contents of config.json of the result, or of its description. Called after all its tensors were made."""
        return source.config

    @abstractmethod
    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        """The tensors of the result, in any order, from those of ``source``, in any order.

        Inputs may be changed in place.
        """
        raise NotImplementedError


def load_converter(spec: str) -> Converter:
    """Build a converter from ``name:key=value,key=value``. Raises ConfigError for an unknown name, key or value."""
    return load(PACKAGE, spec, Converter)
