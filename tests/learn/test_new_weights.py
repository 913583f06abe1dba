"""Learning when the served model gets other weights, in each state of the trainer and the tracer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvasir.client import ipc
from kvasir.learn import link
from kvasir.learn.messages import SOCKET, FromEngine, Order, Renewed, Rest, Stop
from kvasir.models.checkpoint import resolve
from tests.learn.helpers import IDLE, learner, sent, traces
from tests.speculation.helpers import requests

LONG = 60.0  # seconds until something must have happened


@pytest.fixture
def starting(tmp_path):
    """The engine's end of a line whose trainer has read its order, and has not connected yet."""
    trainer = link.Trainer(tmp_path, lambda: Order(model="m", kind="k"), IDLE)
    until = time.monotonic() + LONG
    while trainer.pid is None and time.monotonic() < until:
        time.sleep(0.01)
    assert trainer._channel is None
    yield trainer
    trainer.close()


def test_a_trainer_that_starts_hears_of_the_latest_weights(starting, tmp_path):
    """Without that it would leave out all traces, which are of a later version than its order says."""
    for version in (1, 2):
        starting.send(Renewed(base_version=version, model="m"))
    starting.send(Rest(True))
    engine = ipc.BlockingChannel.connect(str(tmp_path / SOCKET), FromEngine)
    engine._socket.settimeout(LONG)
    until = time.monotonic() + LONG
    while starting._channel is None and time.monotonic() < until:
        time.sleep(0.01)
    starting.send(Rest(False))
    assert [engine.receive(), engine.receive()] == [Renewed(base_version=2, model="m"), Rest(False)]
    engine.close()


def test_a_trainer_that_connects_while_learning_ends_is_told(starting, monkeypatch):
    told = []

    class Channel:
        def __init__(self, connection, kinds) -> None:
            starting.end("enough")  # after the connection was taken, before the channel is there

        def send(self, frame) -> None:
            told.append(frame)

        def close(self) -> None: ...

    monkeypatch.setattr(link.ipc, "BlockingChannel", Channel)
    starting._meet(None)
    assert told == [ipc.encode(Stop())]


def test_a_trainer_reads_the_folder_of_a_model_that_was_named(monkeypatch):
    """Also one that starts later."""
    d = learner(monkeypatch)
    found = sent(d)
    d.engine.update_weights("nano")
    assert found == [Renewed(1, str(resolve("nano")), found[0].target)]
    order = d.engine.learning._order()
    assert Path(order.model) == resolve("nano") and order.base_version == 1
    d.close()


def test_traces_of_cancelled_requests_go_with_the_old_weights(monkeypatch):
    """No step follows the cancel, so their ends are still on the way when the weights change."""
    d = learner(monkeypatch)
    for request in requests(d, 0.0):
        d.submit(request)
    for _ in range(4):
        d.step()
    for request_id in list(d.engine.requests.live):
        d.engine.cancel(request_id)
    d.engine.weights_changed()
    d.run(requests(d, 0.0, tag="new"))
    found = traces(d)
    assert found and all(t.base_version == 1 for t in found)
    assert len({t.request for t in found}) == len(requests(d, 0.0))
    d.close()
