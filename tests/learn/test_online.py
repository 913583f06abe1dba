"""The trainer's process: an order and traces in, candidates and reports out, and what it does when it is told."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvasir.errors import ConfigError
from kvasir.learn import messages
from kvasir.learn.learner import MOST_SCALED
from kvasir.learn.messages import CARD, WEIGHTS, Order
from kvasir.learn.online import Online
from kvasir.learn.pace import LEAST_ROWS
from kvasir.learn.ring import TraceRing
from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads
from tests.learn.handmade import STEPS, nano, trace_of

OPTIONS = {"rows": 96, "forwards": 1, "rate": 3e-3 / MOST_SCALED}


class FakeEngine:
    def __init__(self):
        self.sent = []

    def send(self, message):
        msgspec.msgpack.encode(message)  # what cannot be sent would end the process
        self.sent.append(message)

    def of(self, kind):
        return [m for m in self.sent if isinstance(m, kind)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base():
    return nano()


def order_for(base, **options):
    given = {"kind": "medusa", "layers": [3], "target": base.facts, "dtype": "float32", "every": 4, "version": 7}
    return Order(model=str(resolve("nano")), **(given | {"options": OPTIONS} | options))


@pytest.fixture
def made(tmp_path, base):
    """A trainer beside a ring, with an engine that writes down what it hears."""

    def make(**options):
        order_for(base, **options).write(tmp_path)
        ring = TraceRing.create(tmp_path, 16 << 20)
        engine = FakeEngine()
        online = Online(tmp_path, engine, sleep=lambda s: None)
        opened.append(ring)
        return online, engine, ring

    opened = []
    yield make
    for ring in opened:
        ring.close()


def repeated(base, number):
    """A trace whose rows all want the same token: easily learned."""
    trace = trace_of(base, (3,), STEPS, seed=number, request=f"r{number}")
    row = torch.linspace(-1, 1, base.dim)
    token = int(base.logits(base.normed(row[None])).argmax())
    trace.states[:] = row.numpy()
    trace.tokens[trace.prompt :] = token
    trace.row_tokens[trace.kinds != 2] = trace.tokens[trace.positions[trace.kinds != 2]]
    return trace


def fill(ring, base, count=12):
    for number in range(count):
        assert ring.put(repeated(base, number).encode(), 20)


def bad_head(base, folder):
    """A folder of a head with which nothing is accepted."""
    cls = heads.class_of("medusa")
    head = cls(cls.shape_for(base.dim, base.num_layers))
    with torch.no_grad():
        head.bias.copy_(4 * torch.randn(head.bias.shape, generator=torch.Generator().manual_seed(0)))
    heads.write(head, folder, base.facts)
    return str(folder)


def test_a_candidate_is_a_whole_folder_and_waits_for_its_verdict(made, base, tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.learn.learner.GAIN", 0.5)  # the first candidate passes
    online, engine, ring = made()
    for _ in range(8):
        if engine.of(messages.Candidate):
            break
        fill(ring, base)
        for _ in range(6):
            online.turn()
    (candidate,) = engine.of(messages.Candidate)
    assert candidate.version == 7
    card = json.loads((tmp_path / "candidate-7" / CARD).read_bytes())
    assert card == {"version": 7, "kind": "medusa", "layers": [3], "target": base.facts}
    weights = load_file(tmp_path / "candidate-7" / WEIGHTS)
    head = online.learner.head
    assert {n: p.shape for n, p in weights.items()} == {n: p.shape for n, p in head.named_parameters()}
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in weights.values())

    online.hear(messages.Accepted(version=3))  # of a version that it does not wait for
    assert online.learner.candidate is not None
    online.hear(messages.RolledBack(version=7, reason="slower"))
    assert online.learner.candidate is None and online.learner._least > 1
    online._version, online._sent = 9, 9
    online.learner.candidate = weights, 1.0, 2.0
    online.hear(messages.Accepted(version=9))
    assert online.learner.candidate is None
    assert all(torch.equal(online.learner._served[name], p) for name, p in weights.items())
    online._report()
    report = engine.of(messages.Report)[-1]
    assert report.gaining, "no gate has passed without a gain"
    assert report.slice_rows > 0 and report.slice_ms > 0
    assert report.traced >= 0 and 0 <= report.busy_share <= 1 and len(report.kl_by_depth) == 4


def test_it_rests_when_told_and_takes_traces_meanwhile(made, base):
    online, engine, ring = made()
    online.hear(messages.Rest(on=True))
    fill(ring, base)
    assert not any(online.turn() for _ in range(4)) and online.learner.steps == 0 and online.learner.traced > 0
    online.hear(messages.Rest(on=False))
    assert online.turn()


def test_traces_of_other_weights_and_broken_ones_are_left_out(made, base):
    online, engine, ring = made(base_version=2)
    assert ring.put(b"no trace at all", 1)
    fill(ring, base)
    online.turn()
    online.turn()
    assert len(online.learner.pieces) == 0
    online.hear(messages.Renewed(base_version=0, model=str(resolve("nano")), target={"weights": "new"}))
    fill(ring, base)
    online.turn()
    online.turn()
    assert len(online.learner.pieces) > 0 and online._target == {"weights": "new"}
    online.hear(messages.Renewed(base_version=1, model=str(resolve("nano"))))
    assert len(online.learner.pieces) == 0


def test_it_goes_on_from_the_weights_of_a_folder(made, base, tmp_path):
    head = heads.read("medusa", Path(bad_head(base, tmp_path / "head")))[0]
    online, *_ = made(drafter=str(tmp_path / "head"))
    assert torch.equal(online.learner.head.bias, head.bias) and not online.learner.scratch
    assert online.learner.rate == 3e-3, "weights that were trained on other traffic must be able to follow this one"


def test_orders_that_cannot_be_followed_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match="eagle and medusa can"):
        made(kind="ppd")


def test_on_the_engines_own_device_it_keeps_its_share(tmp_path, base, monkeypatch):
    """The device is stood in for: time passes as the slices say."""
    order_for(base, device="same", share=0.25).write(tmp_path)
    ring, engine, now, slept = TraceRing.create(tmp_path, 16 << 20), FakeEngine(), [0.0], []
    stand_in = SimpleNamespace(float32=torch.float32, device=lambda name: torch.device("cpu"))
    monkeypatch.setattr("kvasir.learn.online.torch", stand_in)

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def clock():
        now[0] += 0.001
        return now[0]

    online = Online(tmp_path, engine, sleep=sleep, clock=clock)
    assert online.learner.slice_rows == min(LEAST_ROWS, OPTIONS["rows"])
    fill(ring, base)
    turns = sum(online.turn() for _ in range(12))
    assert len(slept) == turns > 3 and slept == pytest.approx([0.003] * turns), "1 ms of work, 3 ms of rest"
    ring.close()


def test_a_second_gpu_becomes_the_present_one_before_anything_is_read(tmp_path, base, monkeypatch):
    """Triton launches kernels on the present GPU, whatever GPU their tensors are on."""
    order_for(base, device="cuda:1").write(tmp_path)
    chosen = []

    def read(path, device, dtype):
        assert device == chosen[-1]
        raise ConfigError("far enough")

    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("kvasir.learn.online.Base", SimpleNamespace(read=read))
    with pytest.raises(ConfigError, match="far enough"):
        Online(tmp_path, FakeEngine())
    assert chosen == [torch.device("cuda:1")]


def test_what_a_dead_trainer_left_of_a_candidate_is_no_obstacle(made, base, tmp_path):
    """The next one begins with the same number, since the engine has heard of no candidate."""
    left = tmp_path / "candidate-7"
    left.mkdir()
    (left / WEIGHTS).write_bytes(b"half")
    online, engine, ring = made()
    online.learner.candidate = {"weight": torch.ones(2)}, 1.0, 2.0
    online._send_candidate()
    assert engine.sent == [messages.Candidate(7, str(left))] and list(load_file(left / WEIGHTS)) == ["weight"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_candidate_that_cannot_be_written_ends_learning_with_a_reason(fault, made, base, tmp_path, monkeypatch):
    def full(tensors, file):
        file.write_bytes(b"half")
        raise fault

    online, engine, ring = made()
    online.learner.candidate = {"weight": torch.ones(2)}, 1.0, 2.0
    monkeypatch.setattr("kvasir.learn.online.save_file", full)
    with pytest.raises(ConfigError, match="new weights cannot be written to .*candidate-7: .*No space left"):
        online._send_candidate()
    assert not engine.sent and not (tmp_path / "candidate-7").exists()


def test_a_step_that_has_begun_ends_with_the_old_model(made, base):
    online, engine, ring = made()
    online.learner.slice_rows = 16
    fill(ring, base)
    assert online.turn() and online.turn() and online.learner.steps == 0
    parameters = list(online.learner.head.parameters())
    assert any(p.grad is not None for p in parameters)
    online.hear(messages.Renewed(base_version=1, model=str(resolve("nano"))))
    assert all(p.grad is None for p in parameters)
    assert not online.turn() and online.learner.steps == 0


@pytest.mark.slow
def test_the_process_learns_and_is_gone_with_the_engine(base, tmp_path):
    from kvasir.learn.link import Trainer

    ring = TraceRing.create(tmp_path, 16 << 20)
    head = bad_head(base, tmp_path / "head")
    options = OPTIONS | {"rate": 3e-2 / MOST_SCALED}
    trainer = Trainer(tmp_path, lambda: order_for(base, drafter=head, every=20, options=options))
    found, until = [], time.monotonic() + 120
    while time.monotonic() < until and not any(isinstance(m, messages.Candidate) for m in found):
        fill(ring, base)
        found += trainer.poll()
        time.sleep(0.2)
    assert any(isinstance(m, messages.Candidate) for m in found) and not trainer.ended
    pid = trainer.pid
    trainer.close()
    ring.close()
    assert subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode != 0


@pytest.mark.slow
def test_the_process_says_why_it_ends(base, tmp_path):
    from kvasir.learn.link import Trainer

    ring = TraceRing.create(tmp_path, 16 << 20)
    trainer = Trainer(tmp_path, lambda: order_for(base, kind="ppd"))
    until = time.monotonic() + 60
    while time.monotonic() < until and not trainer.ended:
        time.sleep(0.1)
    assert "eagle and medusa can" in trainer.ended
    trainer.close()
    ring.close()
