"""Links: futures are done once the bytes are there, and a failing job harms no other. Streams are played by fakes."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from kvasir.kv.links import StreamLink, ThreadLink


class FakeEvent:
    """An event that a test completes. ``lost``: waiting for it fails, as on a device that is lost."""

    made: list = []
    lost = False

    def __init__(self, blocking: bool = False) -> None:
        self.done = threading.Event()
        if blocking:  # not the pool's
            FakeEvent.made.append(self)

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        self.done.wait(10)
        if FakeEvent.lost:
            raise RuntimeError("CUDA error: the device is lost")


@pytest.fixture
def link(monkeypatch):
    FakeEvent.made, FakeEvent.lost = [], False
    waited: list = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda what: contextlib.nullcontext())
    pool = SimpleNamespace(changed=None)
    made = StreamLink(torch.device("cuda"), pool)
    yield made, pool, waited
    for event in FakeEvent.made:
        event.done.set()
    made.close()


def event(number: int) -> FakeEvent:
    """The event behind the job of this number, once that was launched."""
    pause = threading.Event()
    for _ in range(2000):
        if len(FakeEvent.made) > number:
            return FakeEvent.made[number]
        pause.wait(0.005)
    raise AssertionError("the job was not launched")


def test_a_future_is_done_when_its_copies_are(link):
    made, pool, waited = link
    first, second = made.submit(lambda: 1), made.submit(lambda: 2)
    event(0), event(1)
    assert not first.done() and not second.done(), "both are launched, and neither has landed"
    assert waited == [pool.changed] * 2, "they run behind what changed pages"
    event(1).done.set()
    event(0).done.set()
    assert (first.result(10), second.result(10)) == (1, 2)


def test_a_job_that_fails_harms_no_other(link):
    made, _, _ = link
    bad, good = made.submit(lambda: 1 / 0), made.submit(lambda: 2)
    event(0).done.set()
    assert isinstance(bad.exception(10), ZeroDivisionError) and good.result(10) == 2


def test_a_lost_device_is_told(link):
    made, _, _ = link
    FakeEvent.lost = True
    future = made.submit(lambda: 1)
    event(0).done.set()
    assert "device is lost" in str(future.exception(10))


def test_jobs_that_have_not_begun_are_cancelled_at_the_end():
    link, begun, go = ThreadLink("test"), threading.Event(), threading.Event()

    def first() -> int:
        begun.set()
        go.wait(10)
        return 1

    running, waiting = link.submit(first), link.submit(lambda: 2)
    begun.wait(10)
    go.set()
    link.close()
    assert running.result(10) == 1 and (waiting.cancelled() or waiting.result(10) == 2)
