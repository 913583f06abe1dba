"""Folders of heads as others publish them: config.json and tensors under their own names.

A layout is a file in ``layouts`` with one subclass of `Layout`: it recognises its folders, turns a config into a shape,
and says which stored tensors fill which weight. Everything else is checked here: a tensor that is missing, of another
shape or unknown is refused by name before one is read.

Weights are safetensors. ``pytorch_model.bin``, which the authors of EAGLE publish, is read by torch's loader for
weights alone, which builds tensors and runs no code of the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models.fill import Stored, read_tensor
from kvasir.models.loader import INDEX, SINGLE, read_headers
from kvasir.plain_files import refuse_special
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.heads import FORMAT
from kvasir.speculation.published.head import PublishedHead, PublishedShape

LAYOUTS = "kvasir.speculation.published.layouts"
PICKLED = "pytorch_model.bin"
# The offset of each draft id from the served model's id, and the ids of the served model that have a draft id.
OFFSETS, DRAFTED = "d2t", "t2d"
ADVICE = "Give the folder as it was published, or use --drafter suffix, which needs no weights."


class Folder:
    """A published folder: its config, and the shapes of its tensors by name, without the prefix "model."."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        try:
            found = dict(self._stored())
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e}. {ADVICE}") from e
        self._tensors: dict[str, Stored | torch.Tensor] = {
            name.removeprefix("model."): tensor for name, tensor in found.items()
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def _stored(self) -> Iterator[tuple[str, Stored | torch.Tensor]]:
        file = self.path / PICKLED
        if any((self.path / name).is_file() for name in (SINGLE, INDEX)) or not file.is_file():
            yield from ((tensor.name, tensor) for tensor in read_headers(self.path))
            return
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # what a damaged or hostile file raises is not documented
            raise ConfigError(f"{file} holds no tensors that can be read without running code: {e}. {ADVICE}") from e
        if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
            raise ConfigError(f"{file} is no table of tensors. {ADVICE}")
        yield from found.items()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the host."""
        stored = self._tensors[name]
        try:
            return stored if isinstance(stored, torch.Tensor) else read_tensor(stored)
        except OSError as e:
            raise ConfigError(f"{self.path} cannot be read: {e}. {ADVICE}") from e

    def fail(self, problem: str) -> ConfigError:
        """The error that names the folder and its problem."""
        return ConfigError(f"{self.path}: {problem}. {ADVICE}")


@dataclass(frozen=True)
class Plan:
    """A head to be made of a folder. ``sources``: for each weight, the stored tensors that fill it, one below the
    other; ``ignored``: stored tensors that are not needed; ``verifier``: the name of the model that the head was
    trained for, "" where the folder does not say."""

    head: type[PublishedHead]
    shape: PublishedShape
    sources: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    verifier: str = ""


class Layout(ABC):
    """A way to write heads down. ``order``: layouts are asked in ascending order, those first that a config names."""

    order: ClassVar[int] = 1

    @abstractmethod
    def takes(self, folder: Folder) -> bool:
        """Whether the folder is written this way."""

    @abstractmethod
    def plan(self, folder: Folder, model: ServedModel) -> Plan:
        """Read the config. Raises ConfigError that names the field, or the difference from the served model."""


def _layouts() -> list[Layout]:
    """All layouts, in their order."""
    found = [technique.find(LAYOUTS, name, Layout)[0] for name in technique.own(LAYOUTS)]
    return [cls() for cls in sorted(found, key=lambda cls: cls.order)]


def open_published(path: Path, layouts: Sequence[Layout] = ()) -> tuple[Folder, Layout] | None:
    """The folder and its layout, one of ``layouts`` (none: those of `LAYOUTS`); None for a folder of our own format, or
    one that holds no head that is known. Raises ConfigError for files that are damaged or special."""
    refuse_special(path)
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("format") == FORMAT:
        return None
    if not any((path / name).is_file() for name in (SINGLE, INDEX, PICKLED)):
        raise ConfigError(f"{path} holds a config.json and neither {SINGLE}, {INDEX} nor {PICKLED}. {ADVICE}")
    folder = Folder(path, config)
    layout = next((layout for layout in layouts or _layouts() if layout.takes(folder)), None)
    return None if layout is None else (folder, layout)


def planned(folder: Folder, layout: Layout, model: ServedModel) -> tuple[Plan, int]:
    """The plan of the folder's head, and its number of weights. Raises ConfigError for tensors that do not fit."""
    try:
        plan = layout.plan(folder, model)
    except ConfigError as e:
        raise e if str(folder.path) in str(e) else folder.fail(str(e)) from e
    with torch.device("meta"):
        head = plan.head(plan.shape)
    _check(folder, plan, head)
    return plan, sum(p.numel() for p in head.parameters())


def load(folder: Folder, layout: Layout, model: ServedModel) -> PublishedHead:
    """The head, ready to run with the model. Raises ConfigError where it cannot."""
    plan, _ = planned(folder, layout, model)
    device, dtype = model.place.device, model.place.dtype
    ids = _ids(folder, plan, model)
    with torch.device("meta"):  # no memory is taken twice
        head = plan.head(plan.shape).to(dtype)
    head = head.to_empty(device=device).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            start = 0
            for part in plan.sources[name]:
                tensor = folder.read(part)
                parameter[start : start + len(tensor)].copy_(tensor)
                start += len(tensor)
    head.ids = None if ids is None else ids.to(device)
    if head.own_table is not None and _same_as_models(head.own_table, model):
        head.own_table = None
    log.info(
        "published drafter %s, %s: it reads the outputs of layers %s (from 0) and %s of the model's %d tokens%s",
        folder.path,
        type(layout).__module__.rpartition(".")[2],
        ", ".join(map(str, plan.shape.layers)),
        f"knows {plan.shape.own_rows}" if plan.shape.own_rows else "knows all",
        model.spec.vocab_size,
        f"; it was trained for {plan.verifier}" if plan.verifier else "",
    )
    return head


def _same_as_models(table_VE: torch.Tensor, model: ServedModel) -> bool:
    """Whether embeddings are those of the model, so that one copy is enough."""
    if table_VE.shape != (model.spec.vocab_size, model.spec.hidden_size):
        return False
    step = 8192
    return all(
        torch.equal(
            table_VE[i : i + step], model.embed(torch.arange(i, min(i + step, len(table_VE)), device=table_VE.device))
        )
        for i in range(0, len(table_VE), step)
    )


def _check(folder: Folder, plan: Plan, head: PublishedHead) -> None:
    """Refuse a folder whose tensors do not fill the head, each of its weights once."""
    used = {OFFSETS, DRAFTED}
    for name, parameter in head.named_parameters():
        parts = plan.sources[name]
        used.update(parts)
        for part in parts:
            if part not in folder.shapes:
                raise folder.fail(f"the tensor {part} is missing")
        shapes = [folder.shapes[part] for part in parts]
        rows = sum(shape[0] if shape else 0 for shape in shapes)
        if any(shape[1:] != tuple(parameter.shape[1:]) for shape in shapes) or rows != parameter.shape[0]:
            wanted = f"{list(parameter.shape)}" + (" together" if len(parts) > 1 else "")
            raise folder.fail(
                f"{', '.join(parts)}: the shape is {', '.join(str(list(shape)) for shape in shapes)}, and config.json "
                f"and the served model ask for {wanted}"
            )
    odd = sorted(name for name in folder.shapes if name not in used and not name.startswith(plan.ignored))
    if odd:
        raise folder.fail(f"it holds {odd[0]}, which heads of this layout do not have: what it does would be left out")


def _ids(folder: Folder, plan: Plan, model: ServedModel) -> torch.Tensor | None:
    """The served model's id for each row of the head's output matrix; None: they are the same. The tensor d2t holds
    offsets: draft id i stands for i + d2t[i]."""
    count, vocab = plan.shape.own_rows, model.spec.vocab_size
    if not count:
        return None
    if OFFSETS not in folder.shapes:
        if count > vocab:
            raise folder.fail(f"it knows {count} tokens, the served model {vocab}, and {OFFSETS} is missing")
        if count < vocab and DRAFTED in folder.shapes:
            raise folder.fail(f"the tensor {OFFSETS} is missing, so its {count} ids cannot be told from the model's")
        return None
    offsets = folder.read(OFFSETS)
    if tuple(offsets.shape) != (count,) or offsets.is_floating_point():
        raise folder.fail(f"{OFFSETS} has the shape {list(offsets.shape)}; expected are {count} whole numbers")
    ids = torch.arange(count) + offsets.long()
    bad = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(bad):
        first = int(bad[0])
        raise folder.fail(
            f"{OFFSETS} sends draft id {first} to token {int(ids[first])}, and the served model has {vocab}: the head "
            "is for another model"
        )
    if len(ids.unique()) != count:
        raise folder.fail(f"{OFFSETS} sends two draft ids to one token")
    if DRAFTED in folder.shapes:
        marked = folder.read(DRAFTED).bool()
        if marked.any() and not torch.equal(marked.nonzero()[:, 0], ids.sort().values):
            raise folder.fail(f"{OFFSETS} sends draft ids to other tokens than those that {DRAFTED} marks")
    return None if torch.equal(ids, torch.arange(count)) else ids
