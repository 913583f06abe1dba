"""The messages between engine and trainer, and the folder in which they meet.

The engine makes a private folder with a listening socket (``socket``), the ring of traces (``ring``) and the order
(``order.json``), and starts ``python -m kvasir.learn.online --folder FOLDER``. The trainer reads the order, connects,
and takes traces. Messages are msgpack frames (`kvasir.client.ipc`); nothing is ever unpickled.

A candidate is a folder with ``model.safetensors`` (the tensors of ``Drafter.weights``, by the same names, in any
floating type) and ``kvasir.json`` (`Candidate.card`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvasir import records

SOCKET, ORDER, WEIGHTS, CARD = "socket", "order.json", "model.safetensors", "kvasir.json"


class Order(msgspec.Struct, kw_only=True):
    """The task of the trainer, as ``order.json``.

    ``model``: checkpoint folder of the served model, whose norm, head and embeddings the trainer needs. ``kind``: name
    of the drafter (eagle, medusa). ``drafter``: folder of the head to start from; "": random weights. ``layers``: the
    tapped layers of the traces, of which the head reads those in its shape. ``target``: what a candidate is made for
    (`kvasir.speculation.heads.facts_of`), to be copied into its card. ``device``: cpu, cuda:N, or same (the engine's
    GPU, in slices). ``dtype``: the model's type. ``share``: most of the time that the trainer may compute on the
    engine's GPU. ``every``: steps between two candidates. ``lam``: weight of rejected rows. ``version``: of the first
    candidate. ``base_version``: traces of an older one are not learned from. ``log_level``: of what it prints."""

    model: str
    kind: str
    drafter: str = ""
    layers: list[int] = []
    target: dict[str, Any] = {}
    device: str = "cpu"
    dtype: str = "bfloat16"
    share: float = 0.1
    every: int = 200
    lam: float = 0.25
    version: int = 1
    base_version: int = 0
    log_level: str = "WARNING"
    options: dict[str, Any] = {}

    def write(self, folder: Path) -> None:
        """Put the order into ``folder``. A reader finds the earlier order or this one, never a part of it."""
        records.replace(folder / ORDER, msgspec.json.encode(self), private=True)

    @classmethod
    def read(cls, folder: Path) -> Order:
        """The order in ``folder``. Raises OSError or msgspec.ValidationError."""
        return msgspec.json.decode((folder / ORDER).read_bytes(), type=cls)


class Card(msgspec.Struct, kw_only=True):
    """``kvasir.json`` of a candidate: its number, the drafter's name, the layers whose outputs it reads, and the facts
    of the model it was trained for (`Order.target`)."""

    version: int
    kind: str
    layers: list[int]
    target: dict[str, Any]


# ------------------------------------------------------------------------------------------------- trainer -> engine


class Candidate(msgspec.Struct, tag=True):
    """New weights lie whole in ``folder`` and have passed the first gate. The engine deletes the folder."""

    version: int
    folder: str


class Report(msgspec.Struct, tag=True, kw_only=True):
    """News for the metrics, about every second. ``kl_by_depth``: recent mean of KL(p || q) in nats; ``traced``: tokens
    learned from since the start; ``busy_share``: recent share of time spent computing; ``slice_rows``, ``slice_ms``:
    rows and milliseconds of the last slice that learned; ``steps``: optimizer steps; ``gaining``: candidates still
    gain, so more traces are worth their copies."""

    kl_by_depth: list[float] = []
    traced: int = 0
    busy_share: float = 0.0
    slice_rows: int = 0
    slice_ms: float = 0.0
    steps: int = 0
    gaining: bool = False


class Ended(msgspec.Struct, tag=True):
    """The trainer stops for good, and says why. It is not started again."""

    reason: str


# ------------------------------------------------------------------------------------------------- engine -> trainer


class Accepted(msgspec.Struct, tag=True):
    """This version is served and has passed the second gate."""

    version: int


class RolledBack(msgspec.Struct, tag=True):
    """This version is not served. ``reason``: it was refused, or a token took longer with it."""

    version: int
    reason: str = ""


class Rest(msgspec.Struct, tag=True):
    """Whether to do nothing until further notice: drafts gain nothing now, and the trainer shares the engine's GPU."""

    on: bool


class Renewed(msgspec.Struct, tag=True):
    """The served model has other weights: forget all traces, read the checkpoint in ``model`` again."""

    base_version: int
    model: str
    target: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True):
    """End now."""


FromTrainer = Candidate | Report | Ended
FromEngine = Accepted | RolledBack | Rest | Renewed | Stop
