"""The seam of product backends: who multiplies by weights that are codes.

A backend is one module in `kvasir/layers/product_backends/`. Once a model's weights are loaded, it takes some of them:
it gives each one a layout of its own in place of its planes, so that no weight is kept twice, and a format
(`weight_format.py`) whose products read that layout. Layers notice nothing. `engine/start/product_choice.py` decides
who takes which weights.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from kvasir.layers.weight_format import Weight
from kvasir.layers.weights import Placement
from kvasir.technique import Technique

BACKENDS = "kvasir.layers.product_backends"
OWN = "triton"  # the backend of the products that formats bring themselves
GATE_AND_UP = ("gate", "up")  # the parts of a matrix whose product ends in a gated activation


class ProductShape(NamedTuple):
    """A class of weights that one backend serves equally fast."""

    layout: tuple  # the fingerprint of the format
    num_outputs: int
    num_inputs: int
    gated: bool

    def __str__(self) -> str:
        return f"{self.layout[0]} {self.num_outputs}x{self.num_inputs}"


def shape_of(weight: Weight) -> ProductShape:
    """The shape class of a weight."""
    gated = tuple(weight.widths) == GATE_AND_UP
    return ProductShape(weight.format.fingerprint(), weight.num_outputs, weight.num_inputs, gated)


class ProductBackend(Technique):
    """Multiplies by weights in a layout of its own."""

    exact = False
    affects_kv = False  # the engine adds what was chosen to the prefix key itself
    # Whether this is the products that formats bring themselves, which take every weight.
    ours_alone = False

    @abstractmethod
    def why_not(self, place: Placement) -> list[str]:
        """Reasons why this backend serves no model here: a package, a compiler, the device, the mode. Empty: it can."""

    @abstractmethod
    def why_not_weight(self, weight: Weight) -> str:
        """The reason why this backend cannot take a weight: its layout or its shape. Empty: it can."""

    @abstractmethod
    def take(self, weight: Weight, trial: bool = False) -> None:
        """Replace format and planes of a filled weight by the backend's own. The result takes no more bytes than the
        weight did, up to a few KiB. ``trial``: it is only timed, with a few numbers of rows, so no other kernels need
        be compiled."""

    def kernels(self, weight: Weight) -> object:
        """A key to the kernels of a weight that was taken. Weights with equal keys share all kernels, so one of them is
        warmed."""
        return shape_of(weight)
