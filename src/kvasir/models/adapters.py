"""Adapters for a decoder that is loaded: read from a folder, and laid out as the slots of its products take them.

Legend: K inputs, N outputs, R rank, P parts of a product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvasir.config import AdapterConfig
from kvasir.errors import ConfigError
from kvasir.layers.adapters import HostPair
from kvasir.layers.linear import Linear
from kvasir.models.decoder import Decoder
from kvasir.models.families import find_family
from kvasir.models.peft import LowRankUpdate, PeftFolder, one_hot_columns, unknown
from kvasir.models.stored import view_of
from kvasir.types import AdapterInfo

# Ranks that buffers may have: an adapter's is rounded up to the next.
RANKS = (8, 16, 32, 64, 128, 256)


def slots_for(decoder: Decoder, config: AdapterConfig, guest_rank: int) -> AdapterSlots | None:
    """The slots of a decoder for requests' adapters and that of a drafter's guests; None: neither is there."""
    if not config.enable_lora and not guest_rank:
        return None
    slots, rank = (config.max_loras, config.max_lora_rank) if config.enable_lora else (0, 0)
    decoder.adapters = AdapterSlots(decoder, slots, rank, guest_rank)
    return decoder.adapters


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory. ``pairs``: by product."""

    info: AdapterInfo
    pairs: dict[str, HostPair]

    @property
    def num_bytes(self) -> int:
        return sum(pair.a_PRK.nbytes + pair.b_NR.nbytes for pair in self.pairs.values())


def bucket(rank: int) -> int:
    """The smallest rank of buffers that holds ``rank``. Raises ConfigError beyond the largest."""
    found = next((size for size in RANKS if rank <= size), None)
    if found is None:
        raise ConfigError(f"rank {rank} is more than {RANKS[-1]}, the largest that is served")
    return found


class AdapterSlots:
    """The slots of every product of a decoder that adapters may change: those of attention and of dense feed-forward
    blocks. ``num_slots`` adapters of up to ``max_rank`` fit, and behind them one of ``guest_rank`` (0: none) that
    computes a drafter's guests."""

    def __init__(self, decoder: Decoder, num_slots: int, max_rank: int, guest_rank: int = 0) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.num_variants = num_slots + (guest_rank > 0)
        self.products: dict[str, Linear] = {}
        self._parts: dict[str, tuple[str, int]] = {}  # stored name of a matrix -> its product, and its place there
        self._dtype, self.device = decoder.place.dtype, decoder.place.device
        family = find_family(decoder.spec.family)
        for i, block in enumerate(decoder.blocks):
            for room, layer in (("mixer", block.mixer), ("ffn", block.ffn)):
                if not getattr(layer, "varies", False):
                    continue
                for attribute, product in vars(layer).items():
                    if not isinstance(product, Linear):
                        continue
                    name = f"layers.{i}.{room}.{attribute}"
                    product.use_adapters(self.num_variants, bucket(max(max_rank, guest_rank)))
                    self.products[name] = product
                    for place, part in enumerate(product.widths):
                        view = view_of(family.stored(f"layers.{i}.{room}.{part}.weight", decoder.spec))
                        if not view.index:  # an adapter of a fused matrix has one A for all its parts: it is merged
                            self._parts[view.name.removesuffix(".weight")] = name, place

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that all slots take."""
        pairs = [product.low_rank.pairs for product in self.products.values()]
        return sum(p.a_SCK.nbytes + p.b_SNR.nbytes + p.columns_SC.nbytes for p in pairs)

    def most_bytes(self) -> int:
        """Bytes of the matrices of the largest adapter that could be stored for this model: in fp64."""
        sides = sum(p.num_inputs * len(p.widths) + sum(p.widths.values()) for p in self.products.values())
        return sides * RANKS[-1] * 8

    def read(self, name: str, path: Path, base: str) -> Adapter:
        """Read an adapter into host memory. Touches neither a slot nor the device, so another thread may call it.
        ``base``: the model's name, for messages. Raises ConfigError that names what is not served and the way out."""
        folder = PeftFolder(path)
        merge = f"kvasir convert merge_lora:adapter={path} {base} NEW_FOLDER"
        folder.refuse_unserved([], merge)
        folder.refuse_unserved(folder.names(), merge)
        tensors = folder.tensors(self.most_bytes())
        key = folder.key()
        fix = f"Merge the adapter into its base model: {merge}"
        pairs, most = self.laid_out(path, folder.updates(tensors), self.max_rank, folder.base, fix)
        return Adapter(AdapterInfo(name=name, path=str(path), key=key, rank=most, base=folder.base), pairs)

    def laid_out(
        self, path: Path, updates: Iterable[LowRankUpdate], max_rank: int, base: str, fix: str
    ) -> tuple[dict[str, HostPair], int]:
        """The matrices of an adapter by product, and its rank. Raises ConfigError, with the ``fix``, for those that are
        not served; ``path`` and ``base`` say in messages whose they are."""
        found: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        most = 0
        for update in updates:
            if update.module not in self._parts:
                raise ConfigError(f"{path}: {unknown(update.module, self._kinds)}. {fix}")
            product, place = self._parts[update.module]
            width, num_inputs = list(self.products[product].widths.values())[place], self._inputs(product)
            shape = (update.b_NR.shape[0], update.a_RK.shape[1])
            if shape != (width, num_inputs):
                raise ConfigError(
                    f"{path}: '{update.module}' changes a matrix of {shape[0]} x {shape[1]}; here it has {width} x "
                    f"{num_inputs}. The adapter is for another base model ({base or 'it does not say which'})."
                )
            most = max(most, update.a_RK.shape[0])
            if most > max_rank:
                raise ConfigError(f"{path}: rank {most} is more than --max-lora-rank {max_rank}")
            a_RK, scaled = update.a_RK.to(self._dtype), (update.b_NR.float() * update.scale).to(self._dtype)
            if not bool(a_RK.isfinite().all() and scaled.isfinite().all()):
                raise ConfigError(
                    f"{path}: '{update.module}' times its scale ({update.scale:g}) is beyond the numbers of "
                    f"{str(self._dtype).removeprefix('torch.')}. Check r, lora_alpha and alpha_pattern."
                )
            found.setdefault(product, {})[place] = a_RK, scaled
        if not found:
            raise ConfigError(f"{path} has no low-rank matrices")
        return {product: self._pair(product, parts) for product, parts in found.items()}, most

    def put_guests(self, pairs: dict[str, HostPair]) -> int:
        """Fill the slot of a drafter's guests. Returns the variant of their rows."""
        for name, product in self.products.items():
            product.low_rank.put(self.num_slots, pairs.get(name))
        return self.num_slots + 1

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN."""
        for product in self.products.values():
            product.low_rank.poison(slot)

    def _pair(self, product: str, parts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> HostPair:
        """The matrices of a product's parts, padded with zeros to one rank; a part that is absent is all zeros."""
        widths = list(self.products[product].widths.values())
        rank = bucket(max(a.shape[0] for a, _ in parts.values()))
        a_PRK = torch.zeros(len(widths), rank, self._inputs(product), dtype=self._dtype)
        b_NR = torch.zeros(sum(widths), rank, dtype=self._dtype)
        columns_PR = torch.full((len(widths), rank), -1, dtype=torch.int32)
        gathered = True
        for place, (a, b) in parts.items():
            own = len(a)
            a_PRK[place, :own], b_NR[sum(widths[:place]) : sum(widths[: place + 1]), :own] = a, b
            columns = one_hot_columns(a)
            gathered = gathered and columns is not None
            if columns is not None:
                columns_PR[place, :own] = columns
        # The first number says whether a slot is gathered, so a product whose first part is absent is multiplied.
        return HostPair(a_PRK, b_NR, columns_PR if gathered and 0 in parts else None)

    def _inputs(self, product: str) -> int:
        return self.products[product].num_inputs

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in self._parts))
