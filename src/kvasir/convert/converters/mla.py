"""Multi-head latent attention made of grouped heads: TransMLA (arXiv 2502.07864) with CARE's factors and ranks (arXiv
2603.17946). Lossy.

RoPE stays in ``rope_dim`` columns and is dropped in all others, which costs quality even at full rank. No training: one
``eigh`` of a Gram in each layer. Full layers are converted, sliding ones stay. Where queries and keys are normed, a
writer makes the latent of the normed key.

The result is a `deepseek_v3` checkpoint where that form holds it, and `kvasir_mla` elsewhere: norms of heads, biases,
softcaps, windows, ranks by layer. DeepSeek norms its latent and this one has none. So that the
norm does nothing there, the latent is made so small that the norm's epsilon alone counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError
from kvasir.layers.spec import DenseSpec, GQASpec, MLASpec
from kvasir.models.families import build_spec, text_of
from kvasir.models.families.kvasir_mla import KINDS, converted, why_not
from kvasir.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from kvasir.convert.calibrate import Layers, Run, Sums
    from kvasir.convert.converter import Tensors
    from kvasir.convert.lowrank import Mixing

# The latent's scale in a deepseek_v3 checkpoint, its norm's weight, and the factor of what reads it. The norm divides
# by sqrt(1e-6) = 1 / 1000, for the squares of a latent so small do not count.
SMALL, NORM_WEIGHT = 2.0**-30, 2.0**20
READ_SCALE = 1 / (SMALL * 1000 * NORM_WEIGHT)
# Texts on which trials are measured: candidates of ``fold``, and each layer's sensitivity.
TRIAL_TEXTS = 8


@dataclass(frozen=True)
class Config:
    """``rank``: elements of the latent, or parity for a cache as wide as the source's. ``rope_dim``: elements that stay
    rotary. ``fold``: neighbouring frequencies treated as one; auto doubles it while the loss falls. ``balance``: how
    keys weigh compared with values. ``metric``: what errors count by: outputs, what reads them (`score`), or the
    weights alone, which is plain SVD. ``alloc``: how ranks are divided among layers, in steps of ``step``. ``texts``:
    a file to calibrate on."""

    rank: str = "parity"
    rope_dim: int = 64
    fold: str = "auto"
    balance: float = 1.0
    metric: Literal["output", "score", "weights"] = "output"
    alloc: Literal["uniform", "care_paper", "care_code", "relative"] = "uniform"
    step: int = 32
    texts: str = ""

    def __post_init__(self) -> None:
        for name, word in (("rank", "parity"), ("fold", "auto")):
            value = getattr(self, name)
            if value != word and not (value.isdecimal() and 0 < int(value) < 1 << 20):
                raise ConfigError(f"mla:{name}={value}: must be a whole number above 0, or {word}")
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ConfigError(f"mla:rope_dim={self.rope_dim}: must be even and at least 2, for RoPE turns pairs")
        if not 0 < self.balance < math.inf:
            raise ConfigError(f"mla:balance={self.balance}: must be above 0")
        if self.step < 1:
            raise ConfigError(f"mla:step={self.step}: must be at least 1")


class ToMLA(Converter):
    exact = False
    calibration = ("kv", "q")
    result = "a model with latent attention; conversion.json holds its held-out loss"

    def check(self, source: Source) -> None:
        config, layers = self.config, source.spec.layers
        if text_of(source.config) is not source.config:
            raise ConfigError(f"{source.path} is made of parts; mla takes checkpoints of text alone")
        if all(isinstance(layer.mixer, MLASpec) for layer in layers):
            raise ConfigError(f"{source.path} has latent attention already; serve it as it is")
        self.full = [i for i, layer in enumerate(layers) if layer.mixer.window is None]
        if not self.full:
            raise ConfigError(
                f"all layers of {source.path} have a window, so no cache grows: there is nothing to convert"
            )
        for index in self.full:
            if (why := why_not(layers[index])) is not None:
                raise ConfigError(f"{source.path}: layer {index} {why}")
            self._check_widths(layers[index].mixer, index)
            for name in ("q", "k", "v", "o"):
                source.stored(f"layers.{index}.mixer.{name}.weight")  # refuses fused tensors
        converted(layers[self.full[0]], self.rank_of(layers[self.full[0]].mixer), config.rope_dim)

    def _check_widths(self, mixer: GQASpec, index: int) -> None:
        rope, heads, dim = self.config.rope_dim, mixer.num_kv_heads, mixer.head_dim
        if not (dim % rope == 0 or (rope % dim == 0 and rope // dim <= heads)):
            raise ConfigError(
                f"mla:rope_dim={rope} does not divide layer {index}'s head_dim of {dim}; take "
                f"{', '.join(str(dim // n) for n in (1, 2, 4) if dim % (2 * n) == 0)}"
            )
        if self.rank_of(mixer) > (most := 2 * heads * dim - rope):
            raise ConfigError(
                f"mla:rank={self.config.rank} is above {most} = 2 x {heads} x {dim} - {rope}, where the cache is as "
                "wide as the source's already; take rank=parity or less"
            )
        if self.rank_of(mixer) < 1:
            raise ConfigError(f"mla:rope_dim={rope} leaves no latent of {2 * heads * dim} elements")
        if self.config.alloc != "uniform" and self.rank_of(mixer) < 2 * self.config.step:
            raise ConfigError(f"mla:step={self.config.step} is more than half of the rank: take a smaller step")
        if self.config.fold != "auto" and int(self.config.fold) not in self.folds(mixer):
            raise ConfigError(f"mla:fold={self.config.fold}: with these widths it is one of {self.folds(mixer)}")

    def rank_of(self, mixer: GQASpec) -> int:
        """The mean rank of a layer with these heads."""
        parity = 2 * mixer.num_kv_heads * mixer.head_dim - self.config.rope_dim
        return parity if self.config.rank == "parity" else int(self.config.rank)

    def folds(self, mixer: GQASpec) -> list[int]:
        """The values that ``fold`` may have: blocks hold whole rotary components, and pairs whole blocks."""
        dim, rope = mixer.head_dim, self.config.rope_dim
        if rope >= dim:
            return [1] if rope > dim else [f for f in _powers(dim // 2) if (dim // 2) % f == 0]
        return [f for f in (n * dim // rope for n in _powers(rope // 2)) if (dim // 2) % f == 0]

    # -------------------------------------------------------------------------------------------------- calibration

    def calibrate(self, source: Source, run: Run) -> None:
        from kvasir.convert import calibrate

        first = source.spec.layers[self.full[0]].mixer
        held = run.layers(run.texts.held_out)
        held.run()
        teacher = calibrate.log_probs(held)
        before = math.exp(calibrate.loss(held))
        self.fold = self._choose_fold(source, run) if self.config.fold == "auto" else int(self.config.fold)
        self.ranks = self._choose_ranks(source, run, self.rank_of(first))
        layers = run.layers()
        with self._restored(layers):
            self.made, energies = self._convert(source, layers, self.ranks, self.fold)
            after = calibrate.measure(self._over(layers, held), teacher)
        self.record = {
            "texts": run.texts.digest,
            "fold": self.fold,
            "ranks": self.ranks,
            "energy": [round(e, 6) for e in energies],
            "held_out": {"perplexity_before": before, "perplexity": after["perplexity"], "kl": after["kl"]},
        }

    def _convert(
        self, source: Source, layers: Layers, ranks: Sequence[int | None], fold: int
    ) -> tuple[dict[int, dict[str, torch.Tensor]], list[float]]:
        """Convert every layer over the converted ones before it: tensors by layer, and the energy that each keeps."""
        spec, made, energies = build_spec(self._own_config(source, ranks)), {}, []
        layers.restart()
        for index in range(len(ranks)):
            if ranks[index] is not None:
                sums = layers.sums(index, self.calibration)
                made[index], energy = self._layer(layers, index, sums, ranks[index], fold)
                energies.append(energy)
                self._install(layers, index, spec, made[index])
            layers.advance(index)
        return made, energies

    def _layer(
        self, layers: Layers, index: int, sums: Sums, rank: int, fold: int
    ) -> tuple[dict[str, torch.Tensor], float]:
        """One layer's tensors in the form of `kvasir_mla`, fp64, and the share of energy in the latent."""
        import torch

        from kvasir.convert import lowrank

        mixer, spec = layers.decoder.blocks[index].mixer, layers.specs[index].mixer
        weights = {name: slot.target.double() for name, slot in mixer.slots().items()}
        mix = self._mixing(sums.kv, spec, fold)
        gram, weight_k, weight_v = sums.kv, None, None
        if self.config.metric == "weights":
            both = torch.cat((weights["k.weight"], weights["v.weight"]))
            gram = both @ both.T
        elif self.config.metric == "score":
            weight_k, weight_v = lowrank.readers(sums.q, weights["o.weight"], spec.num_kv_heads)
        found = lowrank.factor(gram, spec.num_kv_heads, mix.rest, rank, self.config.balance, weight_k, weight_v)
        out, own, groups = {}, f"model.layers.{index}.self_attn.", spec.num_kv_heads
        share = spec.num_heads // groups
        rope_GDQ = mix.rope.view(groups, spec.head_dim, -1)
        pairs = torch.cat((found.key, found.value), 1).repeat_interleave(share, 0)  # [H, 2 D, R]
        out[own + "kv_b_proj.weight"] = pairs.flatten(0, 1)
        if spec.qk_norm is not None:
            out[own + "latent_proj.weight"] = found.down.T
            out[own + "rope_proj.weight"] = mix.rope.T
            out[own + "q_rope"] = rope_GDQ.repeat_interleave(share, 0)
            return out, found.energy
        turned = _interleaved(mix.rope).view(groups, spec.head_dim, -1).repeat_interleave(share, 0)  # [H, D, Q]
        parts = ("weight", "bias") if spec.qkv_bias else ("weight",)
        for leaf in parts:
            q = weights[f"q.{leaf}"].view(spec.num_heads, spec.head_dim, -1)  # [H, D, E or 1]
            kv = torch.cat((weights[f"k.{leaf}"], weights[f"v.{leaf}"])).view(found.down.shape[0], -1)
            q = torch.cat((q, turned.mT @ q), 1).flatten(0, 1)
            a = torch.cat((found.down.T @ kv, _interleaved(mix.rope).T @ kv[: len(mix.rope)]))
            out[own + f"q_proj.{leaf}"], out[own + f"kv_a_proj_with_mqa.{leaf}"] = (
                (q, a) if leaf == "weight" else (q.flatten(), a.flatten())
            )
        return out, found.energy

    def _mixing(self, gram: torch.Tensor, spec: GQASpec, fold: int) -> Mixing:
        from kvasir.convert import lowrank

        size = spec.num_kv_heads * spec.head_dim
        return lowrank.mixing(gram[:size, :size], spec.num_kv_heads, spec.head_dim, self.config.rope_dim, fold)

    def _install(self, layers: Layers, index: int, spec: ModelSpec, made: dict[str, torch.Tensor]) -> None:
        """Put the converted layer into the decoder."""
        from kvasir.convert.calibrate import fill
        from kvasir.layers.mixers.mla import Mixer

        old, own = layers.decoder.blocks[index].mixer, f"model.layers.{index}.self_attn."
        mixer = Mixer(spec.layers[index].mixer, layers.decoder.spec.hidden_size, layers.decoder.place)
        tensors = dict(made)
        for name, slot in old.slots().items():
            kept = (slot.target[0] if slot.repeat else slot.target) - slot.offset
            part, _, leaf = name.rpartition(".")
            tensors.setdefault(f"{own}{part}{'' if 'norm' in part else '_proj'}.{leaf}", kept)
        fill(mixer, index, spec, tensors)
        layers.replace(index, spec.layers[index], mixer)

    @contextmanager
    def _restored(self, layers: Layers) -> Iterator[None]:
        """Put the source's layers back when the block ends."""
        kept = [(layer, block.mixer) for layer, block in zip(layers.specs, layers.decoder.blocks)]
        try:
            yield
        finally:
            for index, (layer, mixer) in enumerate(kept):
                layers.replace(index, layer, mixer)

    def _over(self, layers: Layers, other: Layers) -> Layers:
        """``other``'s texts over the layers as they are in ``layers``."""
        other.specs = layers.specs
        return other

    # ------------------------------------------------------------------------------------------------- what is chosen

    def _choose_fold(self, source: Source, run: Run) -> int:
        """Double ``fold`` while the loss of the partly rotary model, at full rank, falls."""
        from kvasir.convert import calibrate

        mixer, best = source.spec.layers[self.full[0]].mixer, (math.inf, 1)
        full = 2 * mixer.num_kv_heads * mixer.head_dim - self.config.rope_dim
        layers = run.layers(run.texts.calibration[:TRIAL_TEXTS])
        for fold in self.folds(mixer):
            with self._restored(layers):
                self._convert(source, layers, self._all(source, full), fold)
                found = calibrate.loss(layers)
            if found >= best[0]:
                break
            best = found, fold
        return best[1]

    def _choose_ranks(self, source: Source, run: Run, rank: int) -> list[int | None]:
        """Ranks by layer; None: the layer stays."""
        from kvasir.convert import lowrank

        ranks = self._all(source, rank)
        if self.config.alloc == "uniform":
            return ranks
        layers, spectra = run.layers(), []
        for index in range(len(ranks)):
            if ranks[index] is not None:
                spec, sums = layers.specs[index].mixer, layers.sums(index, ("kv",))
                rest = self._mixing(sums.kv, spec, self.fold).rest
                spectra.append(lowrank.spectrum(sums.kv, rest, self.config.balance))
            layers.advance(index)
        weights = self._sensitivities(source, run, rank) if self.config.alloc == "relative" else None
        found = lowrank.allocate(
            spectra, rank, alloc=self.config.alloc, step=self.config.step, most=len(spectra[0]), weights=weights
        )
        for index, chosen in zip(self.full, found):
            ranks[index] = chosen
        return ranks

    def _sensitivities(self, source: Source, run: Run, rank: int) -> list[float]:
        """KL divergence of the last logits where one layer alone is converted, for every full layer."""
        from kvasir.convert import calibrate

        layers = run.layers(run.texts.calibration[:TRIAL_TEXTS])
        layers.run()
        teacher, found = calibrate.log_probs(layers), []
        spec = build_spec(self._own_config(source, self._all(source, rank)))
        for index in self.full:
            with self._restored(layers):
                layers.restart()
                for before in range(index):
                    layers.advance(before)
                sums = layers.sums(index, self.calibration)
                made, _ = self._layer(layers, index, sums, rank, self.fold)
                self._install(layers, index, spec, made)
                layers.run(index)
                found.append(max(calibrate.divergence(layers, teacher), 1e-12))
        return found

    def _all(self, source: Source, rank: int) -> list[int | None]:
        return [rank if i in self.full else None for i in range(len(source.spec.layers))]

    # -------------------------------------------------------------------------------------------------- what is written

    def _own_config(self, source: Source, ranks: Sequence[int | None]) -> dict[str, Any]:
        return source.config | {
            "model_type": "kvasir_mla",
            "architectures": ["KvasirMLAForCausalLM"],
            "base_model_type": source.config["model_type"],
            "kv_lora_rank_per_layer": list(ranks),
            "qk_rope_head_dim": self.config.rope_dim,
        }

    def in_deepseek(self, source: Source) -> bool:
        """Whether a deepseek_v3 checkpoint can hold the result."""
        spec = source.spec
        layer = spec.layers[0]
        mixer, ffn = layer.mixer, layer.ffn
        return (
            source.config["model_type"] in ("llama", "mistral")
            and len(set(self.ranks)) == 1
            and None not in self.ranks
            and all(other == layer for other in spec.layers)
            and mixer.qk_norm is None
            and not (mixer.qkv_bias or mixer.o_bias or mixer.softcap)
            and isinstance(ffn, DenseSpec)
            and not ffn.bias
            and self.config.rope_dim <= mixer.head_dim
            and layer.rope.kind in KINDS
            and self.kind != "float16"
        )

    def edit_config(self, source: Source) -> dict[str, Any]:
        if not self.deepseek:
            return self._own_config(source, self.ranks)
        mixer = source.spec.layers[0].mixer
        kept = {k: v for k, v in source.config.items() if k not in ("sliding_window", "layer_types", "auto_map")}
        return kept | {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "first_k_dense_replace": len(source.spec.layers),
            "num_key_value_heads": mixer.num_heads,
            "kv_lora_rank": self.ranks[0],
            "q_lora_rank": None,
            "qk_rope_head_dim": self.config.rope_dim,
            "qk_nope_head_dim": mixer.head_dim,
            "v_head_dim": mixer.head_dim,
            "head_dim": self.config.rope_dim,
            "rope_interleave": True,
        }

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        import torch

        gone, kinds = set(), set()
        for index in self.made:
            parts = () if source.spec.layers[index].mixer.qk_norm is not None else ("q", "k", "v")
            leaves = ("weight", "bias") if source.spec.layers[index].mixer.qkv_bias else ("weight",)
            gone |= {source.stored(f"layers.{index}.mixer.{part}.{leaf}") for part in parts for leaf in leaves}
        for name, tensor in tensors:
            kinds.add(tensor.dtype)
            if name not in gone:
                yield name, tensor
        dtype = next((d for d in (torch.float32, torch.bfloat16) if d in kinds), torch.float16)
        self.kind = str(dtype).removeprefix("torch.")
        self.deepseek = self.in_deepseek(source)
        for index, made in self.made.items():
            for name, tensor in (self._as_deepseek(source, index, made) if self.deepseek else made).items():
                yield name, tensor.to(device="cpu", dtype=dtype)

    def _as_deepseek(self, source: Source, index: int, made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The layer's tensors under DeepSeek's scale of scores, and with a norm that does nothing."""
        own, mixer, rank = f"model.layers.{index}.self_attn.", source.spec.layers[index].mixer, self.ranks[index]
        a = made[own + "kv_a_proj_with_mqa.weight"].clone()
        a[:rank] *= SMALL
        scale = mixer.scale * math.sqrt(mixer.head_dim + self.config.rope_dim)
        return {
            own + "q_proj.weight": made[own + "q_proj.weight"] * scale,
            own + "kv_a_proj_with_mqa.weight": a,
            own + "kv_a_layernorm.weight": a.new_full((rank,), NORM_WEIGHT),
            own + "kv_b_proj.weight": made[own + "kv_b_proj.weight"] * READ_SCALE,
        }


def _interleaved(columns: torch.Tensor) -> torch.Tensor:
    """Columns in DeepSeek's order, the two of a pair side by side, from real ones before imaginary ones."""
    return columns.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]
