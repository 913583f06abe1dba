"""An engine that learns, with a trainer that does nothing but wait, and candidates that a test makes by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from kvasir.engine.drafts.learning import Learning
from kvasir.learn import link, messages
from kvasir.speculation.heads import facts_of
from tests.speculation.helpers import Driver, driver

IDLE = [sys.executable, "-S", "-c", "import sys, time; time.sleep(1e6)"]


def learner(monkeypatch, drafter: str = "medusa:model=new", **options) -> Driver:
    """A driver whose drafter learns from everybody."""
    monkeypatch.setattr(link, "COMMAND", IDLE)
    monkeypatch.setattr("kvasir.engine.drafts.learning.RING_BYTES", 1 << 22)
    d = driver(drafter, **({"learn": "on", "learn_tenants": ("all",)} | options))
    assert isinstance(d.engine.learning, Learning)
    return d


def weights_of(d: Driver, kind: str = "same") -> dict[str, torch.Tensor]:
    """Weights for the drafter: the present ones, or random ones."""
    generator = torch.Generator().manual_seed(1)
    own = d.engine.learning._versions.kept
    return {
        name: t.clone() if kind == "same" else 3 * torch.randn(t.shape, generator=generator) for name, t in own.items()
    }


def candidate(d: Driver, folder: Path, version: int, weights: dict, **card) -> messages.Candidate:
    """Write a candidate as a trainer does."""
    folder.mkdir(parents=True)
    save_file(weights, folder / messages.WEIGHTS)
    learning = d.engine.learning
    drafter = learning._drafter
    given = dict(
        version=version,
        kind=drafter.name,
        layers=list(drafter.hidden_layers),
        target=facts_of(d.engine.runner.model),
    )
    (folder / messages.CARD).write_bytes(msgspec.json.encode(messages.Card(**given | card)))
    return messages.Candidate(version, str(folder))


def offer(d: Driver, message: messages.FromTrainer) -> None:
    """Let the engine hear a message from the trainer."""
    d.engine.learning._trainer._inbox.put(message)


def staged(d: Driver) -> None:
    """Wait until the candidate that was offered is staged or refused."""
    learning = d.engine.learning
    learning.tick()
    if learning._staging is not None:
        learning._staging[1].exception(10)
        learning.tick()


def every_step_takes(d: Driver, seconds: float = 1.0) -> None:
    """Let all steps take as long, so that the gate counts tokens alone."""
    real = d.engine.learning.stepped
    d.engine.learning.stepped = lambda plan, _, *counts: real(plan, seconds, *counts)


def sent(d: Driver) -> list:
    """Messages to the trainer from now on."""
    found: list = []
    d.engine.learning._trainer.send = found.append
    return found


def traces(d: Driver) -> list:
    """Take everything out of the ring."""
    from kvasir.learn.ring import TraceRing
    from kvasir.learn.trace import Trace

    learning = d.engine.learning
    learning.tracer.drain()
    ring, found = TraceRing.open(learning._folder), []
    while (data := ring.take()) is not None:
        found.append(Trace.decode(data))
    ring.close()
    return found
