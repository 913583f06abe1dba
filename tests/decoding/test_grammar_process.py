"""Grammars are tried in a process of their own: crashes, limits, turns by key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.decoding.grammar_process import Ended, GrammarHost
from kvasir.engine import grammars as grammars_module
from kvasir.engine.grammars import Grammars
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar
from tests.decoding.helpers import EOS

LEAST, MOST = -(1 << 63), (1 << 63) - 1
CRASH = {"type": "integer", "minimum": LEAST, "maximum": LEAST}
SLOW = "tests.decoding.slow_compiler:SlowCompiler"


def request(kind, text, tenant="", **fields):
    return SimpleNamespace(tenant=tenant, params=SimpleNamespace(grammar=Grammar(kind, text, **fields)))


@pytest.fixture(scope="module")
def grammars(tok):
    found = Grammars(tok[0], tok[2], (EOS,), 60.0)
    yield found
    found.close()


@pytest.fixture
def slow(tok):
    found = Grammars(tok[0], tok[2], (EOS,), 600.0, SLOW)
    yield found
    found.close()


def outcome(grammars, kind, text, tenant=""):
    """None, or the status of the refusal."""
    error = grammars.compile(request(kind, text, tenant)).exception(timeout=120)
    assert error is None or isinstance(error, RequestError), error
    return None if error is None else error.status


def test_the_library_does_crash():
    """Negative control: without the process, this schema ends whoever gives it to the library."""
    code = "import sys, llguidance as l;l.LLMatcher.validate_grammar(l.LLMatcher.grammar_from_json_schema(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(CRASH)], capture_output=True, timeout=120)
    if done.returncode >= 0:
        pytest.skip("this version of the library survives the schema")
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": LEAST, "maximum": LEAST},
        {"minimum": MOST, "maximum": MOST},
        {"minimum": LEAST - 5, "maximum": LEAST - 1},
        {"minimum": MOST + 1, "maximum": MOST + 5},
        {"exclusiveMinimum": MOST, "maximum": 1 << 70},
        {"minimum": 1e308, "maximum": 1e308},
        {"minimum": -1e308, "exclusiveMaximum": 1e308},
    ],
)
def test_extreme_numbers_hurt_nobody_else(bounds, grammars):
    for kind in ("integer", "number"):
        assert outcome(grammars, "json_schema", json.dumps({"type": kind, **bounds})) in (None, 400)
        assert outcome(grammars, "choice", '["yes", "no"]') is None


NUMBERS = st.one_of(
    st.sampled_from([LEAST, LEAST + 1, MOST, MOST + 1, LEAST - 1, 1 << 53, 0, -1, 1e308, -1e308, 5e-324]),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
)
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxItems", "const"]
LEAVES = st.builds(
    lambda kind, bounds: {"type": kind, **bounds},
    st.sampled_from(["integer", "number", "string", "array", "object", "boolean", "null"]),
    st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, max_size=3),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s}, inner),
        st.builds(lambda s: {"anyOf": s}, st.lists(inner, min_size=1, max_size=4)),
        st.builds(lambda s: {"allOf": s}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda s: {"type": "object", "properties": s}, st.dictionaries(st.text(max_size=5), inner)),
    ),
    max_leaves=12,
)


def fuzz(grammars, examples):
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS)
    def check(schema):
        assert outcome(grammars, "json_schema", json.dumps(schema)) in (None, 400)

    check()
    assert outcome(grammars, "choice", '["still", "here"]') is None


def test_schemas_at_random(grammars):
    fuzz(grammars, 150)


@pytest.mark.slow
def test_many_schemas_at_random(grammars):
    fuzz(grammars, 10_000)


def test_memory_is_bounded(slow):
    assert outcome(slow, "regex", "hungry") == 400
    assert outcome(slow, "regex", "a") is None


def test_a_crash_is_remembered(slow, monkeypatch):
    assert outcome(slow, "regex", "crash") == 400
    monkeypatch.setattr(Grammars, "_take", lambda self: pytest.fail("tried again"))
    assert outcome(slow, "regex", "crash") == 400


def test_a_process_killed_from_outside_is_replaced_once(slow):
    assert outcome(slow, "regex", "a") is None
    os.kill(slow._idle[0].pid, signal.SIGKILL)
    assert outcome(slow, "regex", "b") is None
    assert outcome(slow, "regex", "killed") == 503


def test_time_is_bounded(tok):
    host = GrammarHost(tok[0], tok[2], (EOS,), 0.3, SLOW)
    process = host.open()
    with pytest.raises(RequestError, match="did not compile within 0.3 s"):
        process.try_out(Grammar("regex", "slow"))
    assert not process.alive


def test_a_killed_process_says_so(tok):
    host = GrammarHost(tok[0], tok[2], (EOS,), 60.0, SLOW)
    process = host.open()
    with pytest.raises(Ended, match="SIGSEGV"):
        process.try_out(Grammar("regex", "crash"))


def test_a_key_with_slow_grammars_leaves_room_for_others(slow):
    """The slow ones never end: whatever answers did not wait for them."""
    held = [slow.compile(request("regex", f"slow{i}", "A:salt")) for i in range(6)]
    assert outcome(slow, "choice", '["yes", "no"]', "B") is None
    assert sum(future.running() for future in held) == grammars_module.NUM_TURNS - 1
    waits = [future.cancel() for future in held]
    assert waits.count(True) == 6 - (grammars_module.NUM_TURNS - 1), "those that run are not cancelled"
    assert not slow._threads.waiting("A"), "cancelled grammars leave the queue"


def test_closing_ends_the_processes(tok):
    found = Grammars(tok[0], tok[2], (EOS,), 600.0, SLOW)
    future = found.compile(request("regex", "slow"))
    until = time.monotonic() + 60
    while not found._busy and time.monotonic() < until:
        time.sleep(0.01)
    (process,) = found._busy
    found.close()
    assert future.exception(timeout=60) is not None and not process.alive


def test_processes_are_forked_from_one_host(tok):
    """The second shares the tokenizer that the host read."""
    host = GrammarHost(tok[0], tok[2], (EOS,), 60.0)
    processes = [host.open() for _ in range(2)]
    for process in processes:
        process.try_out(Grammar("regex", "a"))
    assert {psutil.Process(process.pid).ppid() for process in processes} == {host.pid}
    assert psutil.Process(host.pid).num_threads() == 1, "a fork copies one thread only"
    host.close()
    assert gone(process.pid for process in processes) and not host.alive


def test_a_process_ends_when_its_caller_closes_it(tok):
    host = GrammarHost(tok[0], tok[2], (EOS,), 600.0, SLOW)
    process = host.open()
    process.try_out(Grammar("regex", "a"))
    process.close()
    assert gone([process.pid]) and host.alive
    host.close()


def test_a_host_that_is_killed_is_replaced(slow):
    assert outcome(slow, "regex", "a") is None
    killed = slow._host.pid
    os.kill(killed, signal.SIGKILL)
    os.kill(slow._idle[0].pid, signal.SIGKILL)
    assert outcome(slow, "regex", "ab") is None
    assert slow._host.pid != killed


def test_nothing_is_left_when_the_caller_dies(tok):
    code = (
        "import sys; from pathlib import Path; from kvasir.decoding.grammar_process import GrammarHost\n"
        "from kvasir.types import Grammar\n"
        "host = GrammarHost(Path(sys.argv[1]), int(sys.argv[2]), (1,), 600.0); process = host.open()\n"
        "process.try_out(Grammar('regex', 'a')); print(host.pid, process.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tok[0]), str(tok[2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        pids = [int(part) for part in caller.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        caller.kill()
    assert gone(pids)


def test_a_tokenizer_that_cannot_be_read_is_told_every_time(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    host = GrammarHost(tmp_path / "tokenizer.json", 10, (EOS,), 60.0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot read the tokenizer"):
            host.open().try_out(Grammar("regex", "a"))
    host.close()


def gone(pids) -> bool:
    """Whether the processes end before long."""
    until = time.monotonic() + 60
    return all(_gone(pid, until) for pid in pids)


def _gone(pid: int, until: float) -> bool:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
