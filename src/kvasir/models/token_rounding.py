"""Whether a model's experts may round their rows (``kernels.moe_rounding``), and how."""

from __future__ import annotations

from kvasir.errors import ConfigError
from kvasir.kernels.moe_rounding import DIRECTIONS, Rounding
from kvasir.layers.spec import MoESpec
from kvasir.logs import log
from kvasir.models.spec import ModelSpec


def choose_rounding(direction: str, spec: ModelSpec, exact: bool) -> Rounding | None:
    """The rounding that ``--token-rounding`` names; None: off. Raises ConfigError where a model or a mode cannot have
    it."""
    found = next((known for known in DIRECTIONS if known == direction), None)
    if found is None:
        return None
    if exact:
        raise ConfigError(
            "token_rounding lets the experts of a row depend on the other rows of its step, and --batch-invariant "
            "promises that they do not. Leave out one of the two."
        )
    blocks = [layer.ffn for layer in spec.layers if layer.ffn.kind != "dense"]
    if not blocks:
        raise ConfigError(
            "token_rounding rounds the rows of experts, and this model has no experts. Leave out --token-rounding."
        )
    if not all(isinstance(block, MoESpec) and block.by_softmax for block in blocks):
        raise ConfigError(
            "token_rounding ranks rows by the softmax of the router's logits, and this model chooses its experts in "
            "another way (sigmoids, groups, corrections, or factors of weights). Leave out --token-rounding."
        )
    log.warning("--token-rounding %s is lossy: in steps with long prompts, rows lose experts or get others", direction)
    return Rounding(found)
