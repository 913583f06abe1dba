"""RMS norm as a layer, and the residual stream that runs through the norms.

Legend: T rows, E model dim.
"""

from __future__ import annotations

import torch

from kvasir.kernels.norm import add_normed, add_rms_norm, fits, rms_norm
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement, Slot


class RMSNorm:
    """An RMS norm. ``shape``: that of the scale; its last dimension is the one that is normalised."""

    def __init__(self, shape: int | tuple[int, ...], spec: NormSpec, place: Placement) -> None:
        # 1 + w rounded to bf16 would lose most of w, so a shifted scale stays in fp32.
        self.weight = torch.empty(shape, device=place.device, dtype=torch.float32 if spec.offset else place.dtype)
        self.eps = spec.eps
        self.eps_1 = None if place.exact else torch.full((1,), spec.eps, device=place.device, dtype=torch.float32)
        self.offset = spec.offset
        self.fused = place.fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.eps_1, self.fused)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether one kernel may add to the stream and compute this norm."""
        return self.fused and fits(x, self.weight)

    @property
    def parameters(self) -> tuple[torch.Tensor, float]:
        """Scale and eps, as the kernels take them."""
        return self.weight, self.eps

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(self.weight, self.offset)}


class Stream:
    """The residual stream h [T, E] of a step, and a sublayer's result that is not added yet.

    The addition waits for the next norm, which does both in one kernel. ``h`` belongs to the stream: adding overwrites
    it.
    """

    __slots__ = ("_post", "_x_TE", "h_TE", "inputs_TLP")

    def __init__(self, h_TE: torch.Tensor, inputs_TLP: torch.Tensor | None = None) -> None:
        """``inputs_TLP``: each layer's own embedding of the rows' tokens; None: the model has none."""
        self.h_TE = h_TE
        self.inputs_TLP = inputs_TLP
        self._x_TE: torch.Tensor | None = None
        self._post: RMSNorm | None = None

    def add(self, x_TE: torch.Tensor, post: RMSNorm | None = None) -> None:
        """Let x, or ``post``(x), join the stream. x may be overwritten."""
        assert self._x_TE is None, "one result at a time"
        self._x_TE, self._post = x_TE, post

    def enter(self, norm: RMSNorm | None) -> tuple[torch.Tensor, RMSNorm | None]:
        """The input of the sublayer that begins with ``norm``, and the norm that is left to its first product (None:
        already applied, or there is none)."""
        if self._x_TE is None:
            return self.h_TE, norm
        if norm is None or not norm.fits(self._x_TE):
            return self.value(), norm
        x, post = self._x_TE, None if self._post is None else self._post.parameters
        self._x_TE = None
        normed, self.h_TE = add_rms_norm(x, self.h_TE, *norm.parameters, post)
        return normed, None

    def value(self) -> torch.Tensor:
        """The stream with all results added."""
        x, post, self._x_TE = self._x_TE, self._post, None
        if x is None:
            return self.h_TE
        if post is not None and post.fits(x):
            self.h_TE = add_normed(x, self.h_TE, post.parameters)
        else:
            self.h_TE = (x if post is None else post(x)).add_(self.h_TE)
        return self.h_TE

    @property
    def rest(self) -> torch.Tensor | None:
        """The result [T, E] that is still to be added, which a hook may change; None: there is none."""
        assert self._post is None, "a norm is left to it: hooks at 'resid' are refused"
        return self._x_TE

    def peek(self, out: torch.Tensor) -> None:
        """Write the stream's value into ``out`` [T, E] and leave the stream as it is, so that observing it changes no
        bit."""
        x, post = self._x_TE, self._post
        if x is None:
            out.copy_(self.h_TE)
        else:
            torch.add(x if post is None else post(x), self.h_TE, out=out)
