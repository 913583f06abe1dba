"""A drafter that learns changes how many tokens a step gives, and nothing else, whatever becomes of its trainer."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvasir.engine.drafts import learning as module
from kvasir.engine.drafts.swap_gate import SwapGate
from kvasir.engine.drafts.tracing import STEPS_TOGETHER
from kvasir.errors import ConfigError
from kvasir.learn import link, messages
from kvasir.learn.packed import pack
from kvasir.learn.trace import ACCEPTED, PLAIN, REJECTED
from kvasir.models.checkpoint import resolve
from kvasir.types import Plan
from kvasir_lab import export
from tests.engine.test_taps import truth
from tests.learn.helpers import IDLE, candidate, every_step_takes, learner, offer, sent, staged, traces, weights_of
from tests.speculation.helpers import driver, outputs, plain, requests


@pytest.fixture(scope="module")
def expected():
    return {temperature: plain(temperature, 2, max_tokens=24) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def d(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    d = learner(patch)
    d.engine.learning._look = lambda plan: None  # whatever steps show, all requests are traced
    yield d
    d.close()
    patch.undo()


@pytest.fixture(autouse=True)
def fresh(request):
    """Let every test of the shared engine begin without outputs, candidates and rollbacks."""
    yield
    if "d" in request.fixturenames:
        d = request.getfixturevalue("d")
        d.outputs.clear()
        learning = d.engine.learning
        learning._gate, learning._rollbacks = None, 0
        learning._versions.refuse()


# --------------------------------------------------------------------------------------------------------------- traces


def test_traces_hold_what_the_model_computed(d):
    """States, tree and path of every row; plain, accepted and rejected."""
    traces(d)
    every, model = requests(d, 1.0), export.load(resolve("nano"))
    d.run(every)
    found = traces(d)
    assert len(found) == len(every) and {t.tenant for t in found} == {""}
    kinds = np.concatenate([t.kinds for t in found])
    assert (kinds == PLAIN).any() and (kinds == ACCEPTED).any() and (kinds == REJECTED).any()
    assert {t.prompt for t in found} == {len(r.prompt_ids) for r in every}
    texts = {tuple(r.prompt_ids + d.outputs[r.id, 0].tokens) for r in every}
    for trace in found:
        rows = [i for i, kind in enumerate(trace.kinds) if kind != REJECTED]
        positions = trace.positions[rows].tolist()
        assert positions == list(range(trace.start, trace.start + len(rows)))
        assert trace.tokens[: len(rows)].tolist() == trace.row_tokens[rows].tolist()
        assert any(text[trace.start :] == tuple(trace.tokens.tolist()) for text in texts), "a text of another request"
        text = next(text for text in texts if text[trace.start :] == tuple(trace.tokens.tolist()))
        for i in range(trace.num_rows):
            path = [i]
            while trace.parents[path[0]] >= 0:
                path.insert(0, int(trace.parents[path[0]]))
            assert trace.positions[path].tolist() == list(range(trace.start, int(trace.positions[i]) + 1))
            if i == rows[-1] or trace.kinds[i] == REJECTED and i % 6 == 0:
                ids = [*text[: trace.start], *trace.row_tokens[path].tolist()]
                right = truth(ids, trace.layers, model)[-1]
                torch.testing.assert_close(trace.tensor()[i], right, rtol=2e-3, atol=2e-3)
            if trace.kinds[i] == REJECTED:
                assert int(trace.row_tokens[i]) != text[trace.positions[i]] or trace.kinds[path[-2]] == REJECTED
    stats = d.engine.stats().learning
    assert stats.traced >= sum(t.num_rows for t in found) and not stats.dropped


def test_what_the_engine_records_can_be_packed(d):
    """Every rejected row within the head's depth becomes a guess, prompts are told, and all guesses have a judge."""
    traces(d)
    every = requests(d, 1.0)
    d.run(every)
    found = traces(d)
    assert {t.prompt for t in found} == {len(r.prompt_ids) for r in every}
    packed = pack(found, 4)
    wanted = 0
    for trace in found:
        for row in np.flatnonzero(trace.kinds == REJECTED):
            anchor = row
            while trace.kinds[anchor] != PLAIN:
                anchor = trace.parents[anchor]
            wanted += trace.positions[row] - trace.positions[anchor] < 4
    assert sum(int(level.rejected.sum()) for level in packed.levels) == wanted > 0
    assert all((level.judge >= 0).all() for level in packed.levels[1:])


def test_rows_of_several_steps_go_to_the_host_together(d, monkeypatch):
    """The thread is woken once in some steps, and what it puts together is the same. Nothing is left behind."""
    traces(d)
    tracer, copies, steps = d.engine.learning.tracer, [], []
    copy, stepped = tracer._copy, tracer.stepped
    monkeypatch.setattr(tracer, "_copy", lambda part: (copies.append(len(part)), copy(part)))
    monkeypatch.setattr(tracer, "stepped", lambda: (steps.append(1), stepped()))
    every = requests(d, 1.0, tag="together")
    d.run(every)
    found = traces(d)
    assert len(found) == len(every) and not tracer._noted
    assert len(steps) // STEPS_TOGETHER <= len(copies) <= len(steps) // 2


def test_who_says_no_is_not_recorded(d):
    traces(d)
    d.run(requests(d, 0.0, learn=False))
    assert not traces(d)


def test_long_requests_leave_in_pieces_and_preempted_rows_come_once(d, monkeypatch):
    monkeypatch.setattr(d.engine.learning.tracer, "_piece_rows", 16)
    traces(d)
    every = requests(d, 1.0)
    d.run(every, preempt_every=3)
    found = traces(d)
    assert len(found) > 2 * len(every)
    for name in {t.request for t in found}:
        mine = sorted((t for t in found if t.request == name), key=lambda t: t.start)
        positions = [p for t in mine for p, kind in zip(t.positions.tolist(), t.kinds) if kind != REJECTED]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def test_a_sample_is_traced_while_drafts_pay(d, monkeypatch):
    tracer = d.engine.learning.tracer
    tracer.all = False
    monkeypatch.setattr("kvasir.engine.drafts.tracing.SAMPLED", 0.5)
    traces(d)
    d.run([request for i in range(3) for request in requests(d, 0.0, tag=f"s{i}-", max_tokens=2)])
    assert 0 < len(traces(d)) < 12
    tracer.all = True


def test_all_are_traced_where_drafts_do_not_pay_or_acceptance_falls(d, monkeypatch):
    learning, look = d.engine.learning, module.Learning._look
    controller = learning._drafting.controller
    stats, plan = controller.stats, Plan(0, [])
    monkeypatch.setattr(learning, "_seen", (stats.verified, stats.accepted, stats.drafted))
    monkeypatch.setattr(learning, "_means", [])
    monkeypatch.setattr(learning, "_gaining", True)
    before = stats.verified, stats.accepted
    look(learning, plan)
    assert learning.tracer.all, "more can be learned, whatever `--draft-control fixed` says of drafts"
    learning._gaining = False
    for accepted, everybody in ((20, False), (20, False), (8, True), (20, True), (22, False), (22, False)):
        stats.verified += 10
        stats.accepted += accepted
        look(learning, plan)
        assert learning.tracer.all == everybody
    controller._fixed = False
    look(learning, plan)
    assert learning.tracer.all, "they do not pay now"
    controller._fixed, learning.tracer.all = True, True
    stats.verified, stats.accepted = before


def test_the_trainer_rests_on_the_engines_gpu_where_no_draft_could_pay(d, monkeypatch):
    """It is told again and again: one that starts later, or again, has not heard the first time."""
    learning, heard, pays = d.engine.learning, [], [False]
    plan = SimpleNamespace(spans=[SimpleNamespace(length=1, start=100, commit="walk")])
    monkeypatch.setattr(learning._trainer, "send", heard.append)
    monkeypatch.setattr(learning, "_resting", None)
    monkeypatch.setattr(learning._drafting.controller, "could_pay", lambda decodes, context: pays[0])
    look = functools.partial(module.Learning._look, learning, plan)
    look()
    assert not heard, "a trainer of another device never rests"
    monkeypatch.setattr(learning, "_device", "same")
    look()
    look()
    assert [m.on for m in heard] == [True, True]
    pays[0] = True
    look()
    look()
    assert [m.on for m in heard] == [True, True, False]


def test_new_weights_of_the_model_drop_old_traces(d):
    d.run(requests(d, 0.0))
    heard = sent(d)
    d.engine.weights_changed()
    assert not traces(d) and isinstance(heard[0], messages.Renewed) and heard[0].base_version == 1
    d.run(requests(d, 0.0, tag="again"))
    assert {t.base_version for t in traces(d)} == {1}


# ---------------------------------------------------------------------------------------------------------------- swaps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_swap_every_seven_steps_changes_no_token(temperature, expected, d, tmp_path):
    """To weights as good and to random ones, with preemption and two branches."""
    learning, version = d.engine.learning, d.engine.learning._versions.accepted
    before = learning._stats.swaps
    real, count = d.step, [0]

    def step(preempt: bool = False) -> None:
        real(preempt)
        count[0] += 1
        if count[0] % 7 == 0:
            number = version + count[0]
            kind = "random" if count[0] % 2 else "same"
            learning._gate = None
            learning._versions.refuse()
            offer(d, candidate(d, tmp_path / str(number), number, weights_of(d, kind)))
            staged(d)
            assert learning._versions.serving == number == learning._drafter.version

    d.step = step
    d.run(requests(d, temperature, 2, max_tokens=24), gap=2, preempt_every=5)
    d.step = real
    assert outputs(d) == expected[temperature] and learning._stats.swaps - before >= 4
    assert not os.listdir(tmp_path), "the engine clears up"


def run_until_decided(d, tag: str) -> None:
    learning, rounds = d.engine.learning, 0
    while learning._gate is not None and rounds < 12:
        d.outputs.clear()
        d.run(requests(d, 0.0, tag=f"{tag}{rounds}-"))
        rounds += 1
    assert learning._gate is None


def test_random_weights_are_rolled_back_and_good_ones_stay(d, tmp_path):
    learning = d.engine.learning
    learning.gate_rows = {"rows": 60, "turn": 6, "settling": 0}
    real = learning.stepped
    every_step_takes(d)
    heard, first = sent(d), learning._versions.accepted
    places = {name: t.data_ptr() for name, t in learning._drafter.weights().items()}
    offer(d, candidate(d, tmp_path / "a", first + 1, weights_of(d, "random")))
    staged(d)
    run_until_decided(d, "a")
    assert isinstance(heard[-1], messages.RolledBack) and "a token took" in heard[-1].reason
    assert learning._versions.serving == first == learning._drafter.version
    kept = learning._versions.kept
    assert all(torch.equal(t, kept[name]) for name, t in learning._drafter.weights().items())
    offer(d, candidate(d, tmp_path / "b", first + 2, weights_of(d)))
    staged(d)
    run_until_decided(d, "b")
    assert heard[-1] == messages.Accepted(first + 2) and learning._versions.serving == first + 2
    assert places == {name: t.data_ptr() for name, t in learning._drafter.weights().items()}
    learning._threads.submit(lambda: None).result(10)
    assert (learning._folder / "accepted" / "config.json").exists() and learning._order().drafter.endswith("accepted")
    learning.stepped, learning.gate_rows = real, {}


def test_the_gate_counts_time_and_not_acceptance():
    for new_seconds, passes in ((1.0, True), (1.3, True), (1.5, False)):
        gate, verdict = SwapGate(rows=100, turn=10, settling=2), None
        while verdict is None:
            seconds, tokens = (new_seconds, 12) if gate.new else (1.0, 9)  # accepted more often
            verdict = gate.stepped(seconds, 4, tokens, 16)
        assert verdict == passes, str(gate)


def test_where_drafts_do_not_pay_a_new_version_need_not_wait():
    for paid_by, steps in ((None, 480), ("old", 4128)):
        gate, count = SwapGate(turn=48, settling=0), 0
        while gate.stepped(1.0, 4, 4, 0, paid_by == "old" and not gate.new) is None:
            count += 1
        assert abs(count + 1 - steps) <= 96, "neither at once nor never"


BROKEN = {
    "NaN": lambda folder, weights: weights["bias"].fill_(torch.nan),
    "a missing tensor": lambda folder, weights: weights.pop("bias"),
    "another shape": lambda folder, weights: weights.update(bias=weights["bias"][1:].clone()),
}


@pytest.mark.parametrize("fault", [*BROKEN, "a cut file", "no card", "other layers", "another model"])
def test_a_candidate_that_does_not_fit_is_refused_whole(fault, d, tmp_path):
    learning = d.engine.learning
    heard, before = sent(d), {name: t.clone() for name, t in learning._drafter.weights().items()}
    weights, version = weights_of(d, "random"), learning._versions.accepted + 1
    if fault in BROKEN:
        BROKEN[fault](tmp_path, weights)
    card = {"layers": [0]} if fault == "other layers" else {}
    if fault == "another model":
        card = {"target": {"weights": "0" * 16}}
    message = candidate(d, tmp_path / "c", version, weights, **card)
    if fault == "a cut file":
        file = tmp_path / "c" / messages.WEIGHTS
        file.write_bytes(file.read_bytes()[:-9])
    if fault == "no card":
        (tmp_path / "c" / messages.CARD).unlink()
    offer(d, message)
    staged(d)
    assert isinstance(heard[0], messages.RolledBack) and heard[0].version == version and learning._gate is None
    assert all(torch.equal(t, before[name]) for name, t in learning._drafter.weights().items())
    if fault == "NaN":
        d.run(requests(d, 0.0))


def test_without_the_check_half_a_version_is_served(d, tmp_path, monkeypatch):
    """Control of the tests above."""
    monkeypatch.setattr("kvasir.speculation.versions.check", lambda own, found: None)
    weights = weights_of(d, "random")
    weights["bias"].fill_(torch.nan)
    offer(d, candidate(d, tmp_path / "c", 99, weights))
    staged(d)
    assert not all(torch.isfinite(t).all() for t in d.engine.learning._drafter.weights().values())


# -------------------------------------------------------------------------------------------------------------- tenants


def accepted_of_b(monkeypatch, tenants: tuple[str, ...], learn: bool, folder) -> tuple:
    d = learner(monkeypatch, learn_tenants=tenants)
    for tenant in "ab":
        if tenant == "b" and learn:
            offer(d, candidate(d, folder, 1, weights_of(d, "random")))
            staged(d)
            assert d.engine.learning._versions.serving == 1
        given = requests(d, 0.0, tag=tenant)
        for request in given:
            request.tenant = tenant
        before = d.engine.stats()
        counts = before.drafts, before.drafted_tokens, before.accepted_tokens
        d.run(given)
    stats = d.engine.stats()
    found = [now - then for now, then in zip((stats.drafts, stats.drafted_tokens, stats.accepted_tokens), counts)]
    tokens = {key: out.tokens for key, out in d.outputs.items()}
    assert {t.tenant for t in traces(d)} == ({"a", "b"} if "all" in tenants else {"a"})
    d.close()
    return found, tokens


def test_what_one_tenant_taught_does_not_show_in_anothers_counts(monkeypatch, tmp_path):
    alone, tokens = accepted_of_b(monkeypatch, ("a",), False, None)
    taught, same = accepted_of_b(monkeypatch, ("a",), True, tmp_path / "1")
    shown, still = accepted_of_b(monkeypatch, ("all",), True, tmp_path / "2")
    assert alone == taught and alone[2] > 0 and tokens == same == still
    assert shown != taught, "control: where all share a version, it shows"


# --------------------------------------------------------------------------------------------------------------- faults


def test_ten_refusals_in_a_row_end_learning_and_nothing_else(monkeypatch, tmp_path):
    d = learner(monkeypatch)
    learning = d.engine.learning
    pid = learning._trainer.pid
    for version in range(1, 11):
        weights = weights_of(d)
        weights["bias"].fill_(torch.nan)
        offer(d, candidate(d, tmp_path / str(version), version, weights))
        staged(d)
    stats = d.engine.stats().learning
    assert "10 versions in a row" in stats.ended and stats.rollbacks == 10 and not learning.on
    d.run(requests(d, 0.0))
    learning._trainer._thread.join(60)
    assert learning._trainer.pid is None and (pid is None or not os.path.exists(f"/proc/{pid}"))
    folder = learning._folder
    d.close()
    assert not folder.exists()


def test_a_trainer_that_dies_is_started_three_times_more(monkeypatch):
    monkeypatch.setattr(link, "COMMAND", ["false"])
    d = driver("medusa:model=new", learn="on", learn_tenants=("all",))
    trainer = d.engine.learning._trainer
    trainer._pause = 0.01
    d.run(requests(d, 0.0)[:1])
    until = time.monotonic() + 60
    while not d.engine.stats().learning.ended and time.monotonic() < until:
        time.sleep(0.05)
        d.engine.idle()
    assert trainer._starts == 4 and "died 4 times" in d.engine.stats().learning.ended
    d.run(requests(d, 0.0, tag="after")[:1])
    d.close()


def test_a_full_ring_and_a_dead_tracer_cost_traces_alone(d, expected, monkeypatch):
    learning = d.engine.learning
    monkeypatch.setattr(learning._ring, "put", lambda *args: False)
    dropped = learning.tracer.dropped
    d.run(requests(d, 1.0, 2, max_tokens=24))
    learning.tracer.drain()
    assert learning.tracer.dropped > dropped and outputs(d) == expected[1.0]
    monkeypatch.setattr(learning._ring, "put", lambda *args: 1 // 0)
    d.outputs.clear()
    d.run(requests(d, 1.0, 2, max_tokens=24))
    learning.tracer.drain()
    learning.tick()
    assert "ZeroDivisionError" in learning.tracer.failed and not learning.on and outputs(d) == expected[1.0]


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(learn="maybe", drafter="medusa"), "off, or on"),
        (dict(learn="on"), "Add --drafter"),
        (dict(learn="on", drafter="medusa"), "learns from nobody yet"),
        (dict(learn="on", drafter="ngram", learn_tenants=("all",)), "eagle or medusa"),
        (dict(learn="on", drafter="medusa+ngram", learn_tenants=("all",)), "alone"),
        (dict(learn="on:share=2", drafter="medusa", learn_tenants=("all",)), "share=2"),
        (dict(learn="on:device=cuda", drafter="medusa", learn_tenants=("all",)), "cuda:N"),
        (dict(learn="on:every=0", drafter="medusa", learn_tenants=("all",)), "at least 1"),
        (dict(learn_out="x", drafter="medusa"), "do nothing without"),
    ],
    ids=str,
)
def test_what_cannot_learn_is_refused_at_the_start(options, says):
    from kvasir.config import EngineConfig

    with pytest.raises(ConfigError, match=says):
        module.drafter_for(EngineConfig.of(**options))


def test_the_trainers_device():
    cpu = torch.device("cpu")
    assert module.device_of("auto", cpu) == module.device_of("same", cpu) == module.device_of("cpu", cpu) == "cpu"
    with pytest.raises(ConfigError, match="0 GPUs"):
        module.device_of("cuda:1", cpu)


def test_an_order_is_read_whole_or_not_at_all(tmp_path, monkeypatch):
    """A reader that looks while an order is written finds the earlier one, or none."""
    found, write = [], os.write

    def slow_write(handle, data):
        done = write(handle, data[:100])
        found.append(messages.Order.read(tmp_path).kind if (tmp_path / messages.ORDER).exists() else None)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow_write)
        for kind in ("first", "second"):
            messages.Order(model="m", kind=kind).write(tmp_path)
    assert set(found[: len(found) // 2]) == {None} and set(found[len(found) // 2 :]) == {"first"}
    assert messages.Order.read(tmp_path).kind == "second"


def test_both_ends_of_the_line(tmp_path):
    """The trainer hears what the engine says, and is told when it is gone."""
    trainer = link.Trainer(tmp_path, lambda: messages.Order(model="m", kind="k"), IDLE)
    until, gone, engine = time.monotonic() + 60, [], None
    while engine is None and time.monotonic() < until:
        if (tmp_path / messages.ORDER).exists():
            engine = link.Engine(tmp_path, lambda: gone.append(True))
    assert messages.Order.read(tmp_path).kind == "k"
    engine.send(messages.Report(traced=3))
    trainer_heard = []
    while not trainer_heard and time.monotonic() < until:
        trainer_heard = trainer.poll()
    assert trainer_heard == [messages.Report(traced=3)]
    trainer.send(messages.Rest(True))
    assert engine.poll(60.0) == [messages.Rest(True)]
    os.kill(trainer.pid, 9)
    shutil.rmtree(tmp_path, ignore_errors=True)
    trainer._channel._socket.shutdown(socket.SHUT_RDWR)
    while not gone and time.monotonic() < until:
        time.sleep(0.01)
    assert gone


def test_the_engine_sees_tenants_and_no_keys():
    from kvasir.api.http.auth import name_of
    from kvasir.cli.serve import name_tenants
    from kvasir.config import Settings, compose

    def named(keys: tuple[str, ...], tenants: tuple[str, ...]) -> tuple[str, ...]:
        settings = compose(Settings, {"api_key": keys, "learn_tenants": tenants})
        return name_tenants(settings).speculation.learn_tenants

    assert named(("one", "two"), ("two",)) == (name_of("two"),)
    assert named(("one",), ("one",)) == named(("one", "two"), ("all",)) == ("all",)
    with pytest.raises(ConfigError, match="entry 2") as refused:
        named(("one", "two"), ("two", "secret"))
    assert "secret" not in str(refused.value)


def test_a_request_says_no_in_its_body():
    from kvasir.api.protocols.openai import CompletionBody
    from kvasir.api.protocols.sampling import sampling_params

    body = {"model": "m", "prompt": "p"}
    assert sampling_params(CompletionBody(**body), {}).learn
    assert not sampling_params(CompletionBody(**body, learn=False), {}).learn
