"""Fold the part of CREST that needs no gate into the weights: o reads heads without their component along a direction.

For every chosen head, W_o <- s W_o (I + c v v^T), where s is the mean factor that ``rotate`` would bring a head back to
its length with. Lossy: it acts on every row, so it is another model than one with the hook, to be measured by itself.
It costs nothing at run time. Made of the hooks ``rotate`` at ``head_out`` of a set (`kvasir lab steer crest`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvasir.convert.converter import Tensors
    from kvasir.hooks.hook import Steer

OP, SITE = "rotate", "head_out"


@dataclass(frozen=True)
class Config:
    """``hooks``: folder of the set. ``strength``: as in a request. ``norm``: scale by the mean factor, if the set has
    it."""

    hooks: str = ""
    strength: float = 1.0
    norm: bool = True


class FoldCrest(Converter):
    """A model whose o leaves out a direction of each chosen head."""

    exact = False
    result = "the model with CREST's directions folded into o, on every row"

    def check(self, source: Source) -> None:
        from kvasir.hooks.hook import read_set

        if not self.config.hooks:
            raise ConfigError("fold_crest needs the folder of a set of hooks: fold_crest:hooks=FOLDER")
        one = read_set("fold", Path(self.config.hooks))
        self.changes: dict[str, torch.Tensor] = {}
        for hook in one.hooks:
            if hook.site != SITE or hook.op.partition(":")[0] != OP:
                raise ConfigError(f"{one.path}: '{hook.op}' at '{hook.site}' is not folded; only {OP} at {SITE} is")
            for layer in hook.layers:
                if layer >= len(source.spec.layers):
                    raise ConfigError(f"{one.path} has layer {layer}, and the model {len(source.spec.layers)} layers")
                mixer = source.spec.layers[layer].mixer
                heads, dim = getattr(mixer, "num_heads", 0), getattr(mixer, "head_dim", 0)
                if not heads or not dim:
                    raise ConfigError(f"layer {layer} has a mixer of kind '{mixer.kind}', whose o is not folded")
                tensors = one.of_layer(hook, layer)
                steer = hook.method.steer(tensors, heads, dim)
                gain = steer.gain * self.config.strength
                self.changes[source.stored(f"layers.{layer}.mixer.o.weight")] = self._change(steer, tensors, gain)

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        left = dict(self.changes)
        for name, tensor in tensors:
            change_HDD = left.pop(name, None)
            if change_HDD is None:
                yield name, tensor
                continue
            heads, dim, _ = change_HDD.shape
            parts_EHD = tensor.float().view(len(tensor), heads, dim)
            folded = parts_EHD.transpose(0, 1) @ change_HDD  # [H, E, D]
            yield name, folded.transpose(0, 1).reshape(tensor.shape).to(tensor.dtype)
        if left:
            raise ConfigError(f"{self.config.hooks} changes what {source.path} does not have: {', '.join(left)}")

    def _change(self, steer: Steer, tensors: dict[str, torch.Tensor], gain: float) -> torch.Tensor:
        """The factors [H, D, D] of o's columns, by head; the identity for heads that stay."""
        import torch

        v_HD = steer.vectors_CHD[0]
        scale_H = tensors["scale"].float() if self.config.norm and "scale" in tensors else torch.ones(len(v_HD))
        identity = torch.eye(v_HD.shape[1])
        folded_HDD = scale_H[:, None, None] * (identity + gain * v_HD[:, :, None] * v_HD[:, None, :])
        return torch.where(steer.heads_H[:, None, None], folded_HDD, identity)
