"""Mask rows behind the rows that a step verifies draw the next draft. Exact by default; one forward does both.

I-DLM, introspective strided decoding (arXiv 2604.11035): N - 1 mask rows stand behind the last row, as tokens not known
yet, and each draws the token after its place. They are guest rows (`kvasir.types.Span`), computed with an adapter that
no other row has, so the rows of the text are those of the base model. A model that was trained as a whole
(`kvasir convert idlm`) needs no adapter; its masks read the embedding of its mask token.

A *chain* has masks behind its last draft: 2 N - 1 rows, and none of them is of use after a rejection. A *tree* has
masks behind every draft: N^2 rows, and the next draft is there wherever the walk ends. The controller takes away drafts
and masks that cost more than they promise.

With ``max_accept`` a draft is drawn from the 64 likeliest tokens of its mask row, with noise of its own, and verified
by blocks: more is accepted, the distribution stays, a seed no longer fixes the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from kvasir.decoding import max_accept
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models.checkpoint import read_json
from kvasir.models.peft import PREFIX, WEIGHTS, LowRankUpdate
from kvasir.plain_files import refuse_special
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask, Capture, Host, ServedModel
from kvasir.speculation.self_drafter import SelfDrafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Guess, Guessing

# Tokens that a draft is drawn from with ``max_accept``.
SPREAD = 64
# Most rows of a step in which every draft has masks behind it. Up to about so many, a step of an 8B model on an H100
# waits for weights, and rows are nearly free.
TREE_ROWS = 64
KIND, MASK = "idlm", "mask_embedding"
TRAIN = "Train one with `kvasir train drafter idlm --target MODEL --out FOLDER`."


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of the adapter (default: the served model is trained as a whole); ``stride``: most tokens of a
    step; ``layout``: where masks stand, auto: by the number of sequences; ``max_accept``: draw drafts, and verify them
    by blocks."""

    model: str = ""
    stride: int = 4
    layout: Literal["auto", "chain", "tree"] = "auto"
    max_accept: bool = False


class MaskDrafter(SelfDrafter):
    topology = "tree"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.exact = not config.max_accept
        if config.stride < 2:
            raise ConfigError(f"idlm:stride={config.stride}: a step of one token has no drafts. Use 2 or more.")
        if config.max_accept and config.layout == "tree":
            raise ConfigError(
                "idlm:max_accept=true verifies blocks, which are chains. Use layout=chain, or leave it out."
            )
        self._folder: MaskFolder | None = None
        self._trees = self.exact
        masks = config.stride - 1
        self.tail = (0,) * masks
        self.guessing = Guessing(SPREAD, coupled=False) if config.max_accept else Guessing()
        self.learn_depths(masks)

    def prepare(self, host: Host) -> None:
        if self.config.model:
            self._folder = read_folder(Path(self.config.model).expanduser())
            self.guest_rank = self._folder.rank
            self._check_stride(self._folder.stride, str(self._folder.path))

    def _check_stride(self, trained: int, what: str) -> None:
        if self.config.stride > trained:
            raise ConfigError(
                f"idlm:stride={self.config.stride} is more than {what} was trained for. Use stride={trained} or less, "
                f"or train it further: `kvasir train drafter idlm --resume`."
            )

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        if self.config.max_accept and model.place.exact:
            raise ConfigError(
                "idlm:max_accept=true keeps the distribution of the tokens, not the tokens that exact mode promises. "
                "Leave it out, or --batch-invariant."
            )
        # Exact mode captures no trees, and blocks are chains.
        self._trees = self.exact and not model.place.exact
        self.guests = self._mask(model)[None].to(model.place.device, model.place.dtype)

    def _mask(self, model: ServedModel) -> torch.Tensor:
        """Return what mask rows read [E]. Brings their adapter into its slot."""
        folder, sidecar = self._folder, model.sidecar
        if folder is None:
            if sidecar.mask_id is None or not sidecar.stride:
                raise ConfigError(
                    "idlm needs an adapter, idlm:model=FOLDER, or a model that was trained as a whole, whose "
                    f"kvasir.json names mask_token_id and stride; this one has none. {TRAIN}"
                )
            self._check_stride(sidecar.stride, "this model")
            with torch.inference_mode():
                return model.embed(torch.tensor([sidecar.mask_id], device=model.place.device))[0].clone()
        served = heads.facts_of(model)
        if not heads.check_target(folder.path, "idlm", folder.target, served):
            log.warning(
                "drafter idlm: %s was trained for other weights ('%s') than the served ones: outputs stay the same "
                "(outside exact mode up to ties), but drafts are worse",
                folder.path,
                folder.target.get("name", "?"),
            )
        mask_E, updates = folder.read()
        if mask_E.shape != (model.spec.hidden_size,):
            raise ConfigError(
                f"{folder.path}: mask_embedding has shape {tuple(mask_E.shape)}, but the served model has rows of "
                f"{model.spec.hidden_size}. {TRAIN}"
            )
        name = str(folder.target.get("name", ""))
        pairs, _ = model.adapters.laid_out(folder.path, updates, folder.rank, name, TRAIN)
        self.guest_variant = model.adapters.put_guests(pairs)
        return mask_E

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        stride = self.config.stride
        everywhere = self.config.layout == "tree" or (
            self.config.layout == "auto" and self._trees and len(asks) * stride * stride <= TREE_ROWS
        )
        promise, hazards = self.promise(), self.hazards()
        return [self._tree(ask, promise, hazards, everywhere) for ask in asks]

    def _tree(self, ask: Ask, promise: tuple[float, ...], hazards: list[float], everywhere: bool) -> DraftTree:
        guesses = self.guesses_of(ask.seq)[: min(ask.max_nodes, ask.max_depth)]
        guesses = guesses[: next((i for i, row in enumerate(guesses) if not row), len(guesses))]
        if self.exact:
            tree = DraftTree.chain([row[0][0] for row in guesses], [row[0][1] for row in guesses])
        else:  # estimates that do not depend on what is drawn
            tree = DraftTree.chain(self._draw(ask, guesses), hazards[: len(guesses)])
        nodes = range(-1, len(tree)) if everywhere else [len(tree) - 1]
        tree.guests, tree.promise = {node: (self.tail,) for node in nodes}, promise
        return tree

    def _draw(self, ask: Ask, guesses: list[list[Guess]]) -> list[int]:
        """Draw a draft from the guesses, and leave what it was drawn from for the verification. Greedy sequences take
        the likeliest."""
        seq = ask.seq
        if not guesses or seq.request.params.temperature < max_accept.GREEDY_BELOW:
            return [row[0][0] for row in guesses]
        position = len(seq.tokens) - 1
        seed = max_accept.fresh_stream(seq, position, b"masks")
        noise = np.random.Generator(np.random.Philox(seed)).gumbel(size=(len(guesses), SPREAD))
        tokens = []
        for row, own in zip(guesses, noise):
            weights = np.log(np.maximum([chance for _, chance in row], 1e-38)) + own[: len(row)]
            tokens.append(row[int(weights.argmax())][0])
        seq.state[max_accept.DRAWN] = position, max_accept.Spread.of(guesses)
        return tokens


# ---------------------------------------------------------------------------------------------------------- its folder


@dataclass(frozen=True, slots=True)
class MaskFolder:
    """A folder as its config.json describes it (`docs/methods/idlm.md`). ``target``: the
    model it was trained for, as in `kvasir.speculation.heads.write`."""

    path: Path
    target: dict[str, Any]
    stride: int
    rank: int
    alpha: float

    def read(self) -> tuple[torch.Tensor, list[LowRankUpdate]]:
        """The mask's embedding [E] and the adapter. Raises ConfigError for what is missing, not finite, or no matrix of
        an adapter."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = {name.removeprefix(PREFIX): t for name, t in load_file(self.path / WEIGHTS).items()}
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"{self.path / WEIGHTS} cannot be read ({e}). {TRAIN}") from e
        broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
        if broken is not None:
            raise ConfigError(f"{self.path / WEIGHTS}: '{broken}' holds NaN or infinity. {TRAIN}")
        mask = tensors.pop(MASK, None)
        if mask is None:
            raise ConfigError(
                f"{self.path / WEIGHTS} has no '{MASK}', which mask rows read. Export it with the adapter. {TRAIN}"
            )
        return mask, list(self._updates(tensors))

    def _updates(self, tensors: dict[str, torch.Tensor]) -> Iterator[LowRankUpdate]:
        for name, a in tensors.items():
            module, _, part = name.partition(".lora_")
            if part == "B.weight" and f"{module}.lora_A.weight" in tensors:
                continue
            b = tensors.get(f"{module}.lora_B.weight") if part == "A.weight" else None
            if b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or len(a) != self.rank:
                raise ConfigError(
                    f"{self.path / WEIGHTS}: '{name}' of shape {tuple(a.shape)} is no half of a pair of rank "
                    f"{self.rank}. {TRAIN}"
                )
            yield LowRankUpdate(module, a, b, self.alpha / self.rank)


def read_folder(path: Path) -> MaskFolder:
    """Read what a folder says of itself. Raises ConfigError for one that is no drafter of this kind."""
    refuse_special(path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no I-DLM drafter: it has no config.json. {TRAIN}")
    config = read_json(path / "config.json")
    if config.get("kind") != KIND:
        raise ConfigError(f"{path} holds no I-DLM drafter: config.json says kind {config.get('kind')!r}. {TRAIN}")
    stride, rank, alpha = config.get("stride"), config.get("rank"), config.get("alpha")
    for name, value, least in (("stride", stride, 2), ("rank", rank, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{path}: {name} is {value!r} in config.json, expected a number from {least} on. {TRAIN}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or alpha <= 0:
        raise ConfigError(f"{path}: alpha is {alpha!r} in config.json, expected a positive number. {TRAIN}")
    target = config.get("target")
    if not isinstance(target, dict):
        raise ConfigError(f"{path}: config.json does not say for which model ('target'). {TRAIN}")
    return MaskFolder(path, target, stride, rank, float(alpha))
