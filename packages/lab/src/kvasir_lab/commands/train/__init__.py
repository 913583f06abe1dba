"""``kvasir train``: train parts that make a model cheaper to serve."""

from __future__ import annotations

from kvasir.cli.command import Declared, group
from kvasir.technique import own
from kvasir_lab.commands.train._kinds import MODELS, of_model


def models() -> dict[str, Declared]:
    """The commands that train whole models, one for each kind."""
    return {name: of_model(name) for name in own(MODELS)}


train = group(__name__, 120, "Train parts that make a model cheaper to serve.", more=models)
