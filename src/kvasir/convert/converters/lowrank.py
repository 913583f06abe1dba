"""Latents of keys and of values for the KV codec `lowrank` (CARE's one-shot form, arXiv 2603.17946). Lossy below full
rank.

The model stays as it is; the result is a folder that ``--kv-codec lowrank:folder=FOLDER`` reads. RoPE is exact, so only
the rank costs quality. Keys and values have a latent each, with the same mean rank, and no training: one ``eigh`` of a
Gram for each. Layers with a window are left out.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError
from kvasir.layers.spec import GQASpec, MLASpec

if TYPE_CHECKING:
    import torch

    from kvasir.convert.calibrate import Layers, Run
    from kvasir.convert.converter import Tensors
    from kvasir.convert.lowrank import Side

Pair = tuple[int, int]  # ranks of a layer's keys and values
# Texts on which each layer's sensitivity is measured.
TRIAL_TEXTS = 8


@dataclass(frozen=True)
class Config:
    """``rank``: mean rank of each of the two latents, or parity for a cache as wide as the source's. ``metric``: what
    errors count by: outputs (CARE), what reads them (`score`, ours), or the weights alone, which is plain SVD.
    ``alloc``: how ranks are divided among layers, in steps of ``step``. ``texts``: a file to calibrate on."""

    rank: str = "parity"
    metric: Literal["output", "score", "weights"] = "output"
    alloc: Literal["uniform", "care_paper", "care_code", "relative"] = "uniform"
    step: int = 32
    texts: str = ""

    def __post_init__(self) -> None:
        if self.rank != "parity" and not (self.rank.isdecimal() and 0 < int(self.rank) < 1 << 20):
            raise ConfigError(f"lowrank:rank={self.rank}: must be a whole number above 0, or parity")
        if self.step < 1:
            raise ConfigError(f"lowrank:step={self.step}: must be at least 1")


class ToLowRank(Converter):
    exact = False
    calibration = ("kv", "q")
    result = "latents for --kv-codec lowrank:folder=FOLDER; conversion.json holds the held-out loss"
    files = ("latents.safetensors", "latents.json")  # as in kvasir.kv.latents

    def check(self, source: Source) -> None:
        layers = source.spec.layers
        for index, layer in enumerate(layers):
            mixer = layer.mixer
            if isinstance(mixer, MLASpec):
                raise ConfigError(f"{source.path} caches latents already; serve it as it is")
            if not isinstance(mixer, GQASpec) or layer.cache_of is not None:
                raise ConfigError(f"{source.path}: layer {index} has no keys and values of its own, and no low rank")
            odd = [n for n in ("gated", "keys_are_values", "value_norm", "flat_norm") if getattr(mixer, n)]
            if odd and mixer.window is None:
                raise ConfigError(f"{source.path}: layer {index} is {odd[0]}, and calibration reads plain projections")
        self.full = [i for i, layer in enumerate(layers) if layer.mixer.window is None]
        if not self.full:
            raise ConfigError(f"all layers of {source.path} have a window, so no cache grows: nothing to make smaller")
        for index in self.full:
            most, rank = self.width(source, index), self.rank_of(source, index)
            if rank > most:
                raise ConfigError(
                    f"lowrank:rank={rank} is above layer {index}'s {most}, where nothing is lost already; take "
                    "rank=parity or less"
                )
            if self.config.alloc != "uniform" and rank < 2 * self.config.step:
                raise ConfigError(f"lowrank:step={self.config.step} is more than half of the rank: take a smaller step")

    def width(self, source: Source, index: int) -> int:
        """Elements of a layer's keys, and of its values."""
        mixer = source.spec.layers[index].mixer
        return mixer.num_kv_heads * mixer.head_dim

    def rank_of(self, source: Source, index: int) -> int:
        """The mean rank of a layer like this one."""
        return self.width(source, index) if self.config.rank == "parity" else int(self.config.rank)

    # -------------------------------------------------------------------------------------------------- calibration

    def calibrate(self, source: Source, run: Run) -> None:
        from kvasir.convert import calibrate

        held = run.layers(run.texts.held_out)
        held.run()
        teacher, before = calibrate.log_probs(held), math.exp(calibrate.loss(held))
        self.ranks = self._choose_ranks(source, run)
        layers = run.layers()
        self.sides: dict[int, tuple[Side, Side]] = {}
        for index in range(len(layers.specs)):
            if index in self.ranks:
                self.sides[index] = self._install(layers, index, self.ranks[index])
            layers.advance(index)
        held.codecs = layers.codecs
        after = calibrate.measure(held, teacher)
        self.record = {
            "texts": run.texts.digest,
            "ranks": [self.ranks.get(i) for i in range(len(source.spec.layers))],
            "energy": [[round(side.energy, 6) for side in pair] for pair in self.sides.values()],
            "held_out": {"perplexity_before": before, "perplexity": after["perplexity"], "kl": after["kl"]},
        }

    def _install(self, layers: Layers, index: int, ranks: Pair) -> tuple[Side, Side]:
        """Make a layer's latents over the layers as they are now, and cache by them from now on."""
        from kvasir.kv.latents import LatentLayer, Maps

        sides, place = self._sides(layers, index, ranks), layers.decoder.place
        codec, table = LatentLayer(*ranks), layers.table(index)
        maps = Maps.of(_matrices(sides), layers.specs[index].mixer.num_kv_heads, place.device, place.dtype)
        codec.fill(maps, None if table is None else table.table, place.exact)
        layers.codecs[index] = codec
        return sides

    def _sides(self, layers: Layers, index: int, ranks: Pair) -> tuple[Side, Side]:
        from kvasir.convert import lowrank

        spec, sums = layers.specs[index].mixer, layers.sums(index, self.calibration)
        weights = {name: slot.target.double() for name, slot in layers.decoder.blocks[index].mixer.slots().items()}
        size, readers = spec.num_kv_heads * spec.head_dim, (None, None)
        grams = sums.kv[:size, :size], sums.kv[size:, size:]
        if self.config.metric == "weights":
            grams = tuple(w @ w.T for w in (weights["k.weight"], weights["v.weight"]))
        elif self.config.metric == "score":
            rope = layers.specs[index].rope
            q_HDD = sums.q if rope is None else lowrank.turned(sums.q, rope.head_dim)
            readers = lowrank.readers(q_HDD, weights["o.weight"], spec.num_kv_heads)
        first, second = (lowrank.side(gram, rank, weight) for gram, rank, weight in zip(grams, ranks, readers))
        return first, second

    def _choose_ranks(self, source: Source, run: Run) -> dict[int, Pair]:
        """Ranks of the layers that are changed. Keys and values have budgets of their own."""
        import torch

        from kvasir.convert import lowrank

        means = [self.rank_of(source, i) for i in self.full]
        if self.config.alloc == "uniform":
            return {i: (rank, rank) for i, rank in zip(self.full, means)}
        layers, spectra = run.layers(), ([], [])
        for index in range(len(layers.specs)):
            if index in self.full:
                gram, size = layers.sums(index, ("kv",)).kv, self.width(source, index)
                for found, part in zip(spectra, (gram[:size, :size], gram[size:, size:])):
                    found.append(torch.linalg.eigvalsh(part).flip(0).clamp_min(0).tolist())
            layers.advance(index)
        weights = self._sensitivities(run, means[0]) if self.config.alloc == "relative" else None
        choose = lambda found: lowrank.allocate(  # noqa: E731
            found, means[0], alloc=self.config.alloc, step=self.config.step, most=len(found[0]), weights=weights
        )
        return dict(zip(self.full, zip(choose(spectra[0]), choose(spectra[1]))))

    def _sensitivities(self, run: Run, rank: int) -> list[float]:
        """KL divergence of the last logits where one layer alone has latents, for every full layer."""
        from kvasir.convert import calibrate

        layers = run.layers(run.texts.calibration[:TRIAL_TEXTS])
        layers.run()
        teacher, found = calibrate.log_probs(layers), []
        for index in self.full:
            layers.codecs.clear()
            layers.restart()
            for before in range(index):
                layers.advance(before)
            self._install(layers, index, (rank, rank))
            layers.run(index)
            found.append(max(calibrate.divergence(layers, teacher), 1e-12))
        return found

    # -------------------------------------------------------------------------------------------------- what is written

    def edit_config(self, source: Source) -> dict[str, Any]:
        count = len(source.spec.layers)
        mixers = [layer.mixer for layer in source.spec.layers]
        return {
            "model": source.path.resolve().name,
            "ranks": [self.ranks.get(i) for i in range(count)],
            "heads": [[m.num_kv_heads, m.head_dim] for m in mixers],
            "digest": self.digest,
        }

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        digest = hashlib.blake2b(digest_size=16)
        for index, sides in self.sides.items():
            for name, matrix in _matrices(sides).items():
                matrix = matrix.cpu().contiguous()
                digest.update(matrix.numpy().tobytes())
                yield f"layers.{index}.{name}", matrix
        self.digest = digest.hexdigest()


def _matrices(sides: tuple[Side, Side]) -> dict[str, torch.Tensor]:
    """A layer's matrices as they are stored, fp32."""
    keys, values = sides
    found = {"k_down": keys.down.T, "k_up": keys.up, "v_down": values.down.T, "v_up": values.up}
    return {name: matrix.float() for name, matrix in found.items()}
