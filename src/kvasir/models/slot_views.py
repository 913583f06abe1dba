"""Which stored tensor fills which slot of a model, by its family, and which tensors are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch

from kvasir.models.families import find_family
from kvasir.models.fill import Stored, read_tensor
from kvasir.models.formats import Formats, Quantising
from kvasir.models.mtp_fields import WEIGHT, finder, names_of, with_mtp
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View, view_of

EMBED, HEAD, LABELS = "embed.weight", "head.weight", "labels.weight"
# Names of transformers: the head for classes, and the prefix of everything that is not a head.
STORED_LABELS, PREFIX = "score.weight", "model."


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """The family's name of a tensor: some checkpoints of a family have other prefixes."""
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


def view_of_slots(
    stored: Sequence[Stored], spec: ModelSpec, formats: Formats | Quantising | None = None
) -> Callable[[str], View]:
    """The stored tensor of each slot. A model that was saved without a head lacks the prefix ``model.``."""
    family = find_family(spec.family)
    names, embed = {t.name for t in stored}, view_of(family.stored(EMBED, spec)).name
    known = {renamed(name, getattr(family, "RENAMED", {})) for name in names}
    bare = embed not in names and embed.removeprefix(PREFIX) in names
    usual = finder(family.stored, family, spec)
    otherwise = finder(getattr(family, "stored_otherwise", lambda slot, spec: None), family, spec)

    def view(slot: str) -> View:
        if slot == LABELS:
            return View(STORED_LABELS)
        slot, _, plane = slot.partition("/")
        found = usual(slot)
        if found.name not in known and (other := otherwise(slot)) is not None:
            found = other if other.name in known else found
        found = replace(found, name=found.name.removeprefix(PREFIX)) if bare else found
        return found if formats is None else formats.stored(slot, plane, found, known)

    return view


def prefix_left_out(spec: ModelSpec, family: ModuleType, stored: Iterable[Stored]) -> Callable[[str], str | None]:
    """The prefix that tells that a tensor is not read, by its name; None: it must be. An MTP layer is read where a
    drafter has asked for it, except for what it shares. A layer behind the last one that is no MTP layer is one that
    config.json does not count."""
    prefixes, names = getattr(family, "LEFT_OUT", ()), names_of(family, len(spec.layers))
    if hasattr(family, "left_out") and (names is None or any(t.name == names.proj + WEIGHT for t in stored)):
        prefixes += family.left_out(spec)
    names = None if spec.mtp is None else names
    copies = () if names is None else ((names.embed, spec.mtp.own_embed), (names.head, spec.mtp.own_head))
    read = {copy + WEIGHT for copy, own in copies if own}

    def prefix_of(name: str) -> str | None:
        if names is not None and (names.owns(name) or name in read):
            return None
        return next((p for p in prefixes if name.startswith(p)), None)

    return prefix_of


def read_mtp(spec: ModelSpec, stored: Sequence[Stored]) -> ModelSpec:
    """The model with its MTP layer, as the checkpoint's tensors have it (none: it shares all it can). A copy of the
    embedding or of the output matrix is its own only where it differs. Raises ConfigError where it has none."""
    family, view = find_family(spec.family), view_of_slots(stored, spec)
    tensors = {renamed(t.name, getattr(family, "RENAMED", {})): t for t in stored}
    found, names = with_mtp(spec, family, tensors if stored else None), names_of(family, len(spec.layers))

    def differs(copy: str, slot: str) -> bool:
        mine, model = tensors.get(copy + WEIGHT), tensors.get(view(slot).name)
        if mine is None or model is None:
            return mine is not None
        return mine.shape != model.shape or not torch.equal(read_tensor(mine), read_tensor(model))

    head = EMBED if spec.tied else HEAD
    own = {"own_embed": differs(names.embed, EMBED), "own_head": differs(names.head, head)}
    return replace(found, mtp=replace(found.mtp, **own))
