"""The products that each weight format brings itself: Triton and BLAS on GPUs, C and torch on CPUs."""

from __future__ import annotations

from kvasir.layers.product_backend import ProductBackend
from kvasir.layers.weight_format import Weight
from kvasir.layers.weights import Placement


class Triton(ProductBackend):
    """Every weight as it is."""

    ours_alone = True

    def why_not(self, place: Placement) -> list[str]:
        return []

    def why_not_weight(self, weight: Weight) -> str:
        return ""

    def take(self, weight: Weight, trial: bool = False) -> None:
        """Leave the weight as it is."""
