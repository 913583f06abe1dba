"""The seam of what is trained on a target's replies: drafters (`kvasir_lab.trained_drafters`), and whole models that
draft for themselves (`kvasir_lab.trained_models`).

A kind is a file with one subclass of `Kind`, found by its name. `kvasir_lab.drafters.training` samples the replies,
runs the steps, resumes, measures and writes the card for all of them.

Legend: B texts, T tokens, D depths (guesses in a row).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from kvasir.technique import Technique
from kvasir_lab.drafters.acceptance import acceptance
from kvasir_lab.drafters.data import Batch, Texts
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model

DRAFTERS, MODELS = "kvasir_lab.trained_drafters", "kvasir_lab.trained_models"


class Kind(Technique):
    """A way to train weights on the replies of a target.

    ``title`` heads the card; ``rate`` is the peak learning rate; ``data`` says whose replies are trained on: the
    target's own (self) or those that the tasks give (text). After `begin`, ``module`` holds the trained weights,
    ``depth`` is the number of guesses, and ``places`` the number of the model's rows for each token of a text.
    """

    title: ClassVar[str]
    rate: ClassVar[float] = 2e-3
    data: Literal["self", "text"] = "self"
    loss_name = "KL"
    loss_text = (
        "The loss is the KL divergence from the model's own\n"
        "distribution on its frozen hidden states, weighted by 0.8 to the power of the depth."
    )
    module: nn.Module
    target: Target
    depth: int
    places = 1

    @abstractmethod
    def begin(self, target: Target, seed: int) -> None:
        """Make the first weights for ``target``."""
        raise NotImplementedError

    @abstractmethod
    def losses(self, batch: Batch, step: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The number to minimise, and what is shown of it: nats by depth [D]. ``step`` seeds what is drawn; ``share``
        of the run is done."""
        raise NotImplementedError

    @abstractmethod
    def guesses(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Yield for j = 0, 1, ... the likeliest tokens [B, T], where row p guesses token p + 2 + j of a reply."""
        raise NotImplementedError

    @abstractmethod
    def write(self, folder: Path, tokenizer: Any) -> None:
        """Write what is served, except its card. ``tokenizer``: the target's, for a whole model's folder."""
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer. ``scale`` of a group multiplies its learning rate."""
        return [{"params": [p for p in self.module.parameters() if p.requires_grad]}]

    def served(self) -> Kind:
        """The same kind with a copy of its weights in the type that they are served in."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(self.target.dtype).eval()
        return other

    def measure(self, texts: Texts) -> dict[str, Any]:
        """Acceptance on held-out greedy replies, with the fields of `acceptance.acceptance`."""
        return acceptance(self.served().guesses, self.depth, texts, self.target.device)

    @classmethod
    def intro(cls, run: dict[str, Any]) -> str:
        """The card's first paragraphs, from the record of a run: what the folder is for."""
        command = f"kvasir serve MODEL --drafter {run['kind']}:model=FOLDER"
        size, weights = size_of(run["parameters"]), run["target"]["weights"]
        return f"""A drafter for kvasir: `{command}`. It changes how many tokens a forward
pass gives. It changes no token in exact mode; elsewhere only a tie between tokens may end differently.

It has {size} parameters; embedding and output matrix are the model's own. It was trained for the
weights with the fingerprint `{weights}`. With other weights of the same shape it works, but drafts worse."""

    @classmethod
    def more(cls, found: dict[str, Any]) -> str:
        """The card's lines below the tables, from what `measure` found."""
        return ""

    def whole_model(self) -> Model | None:
        """The trained model as it is served, where a whole model is trained: acceptance is then measured on its own
        replies."""
        return None

    @property
    def num_trained(self) -> int:
        """Number of trained weights."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def about(self) -> str:
        """One line for the begin of a run: size, and what is read."""
        return f"{size_of(self.num_trained)} parameters ({2 * self.num_trained / 1e6:.2f} MB in bf16)"


def size_of(parameters: int) -> str:
    """A number of weights, in millions where there are many."""
    return f"{parameters / 1e6:.2f}M" if parameters >= 1e5 else f"{parameters:,}"
