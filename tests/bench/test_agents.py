"""``kvasir bench agents`` with servers: ours with the smallest model, a stand-in for vLLM's, and scripted replies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.bench import agents, case
from kvasir.bench.agents_load import AgentLoad, every
from kvasir.bench.case import parse
from kvasir.bench.workloads import SHAPES
from kvasir.errors import ConfigError
from tests.bench.helpers import SITE, SMALL
from tests.bench.test_online import chunk, fake  # noqa: F401 (a fixture)
from tests.bench.test_result import check
from tests.cli.conftest import kvasir  # noqa: F401  the fixture

ROOT = Path(__file__).parents[2]
TINY = {"sessions": 2, "turns": 3, "system": 32, "task": 16, "result": 16, "output": 4, "pause": 0.02, "forks": 0.0}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(agents, "REST", 0.1)
    monkeypatch.setitem(SHAPES, "small", SMALL)


def test_two_sessions_of_three_turns(quick):
    table = {"model": "nano", "repeats": 1, "settings": {"device": "cpu", "num_threads": 1, "max_model_len": 256}}
    kept = []
    found = agents.measure(parse("c", table | {"agents": {"s2": TINY}}), keep=kept.append)
    check(found)
    metrics = found["arms"][0]["metrics"]
    values = {key.removeprefix("s2."): value.get("median") for key, value in metrics.items() if "values" in value}
    assert values["turns"] == 6 and values["failed"] == values["short"] == 0
    sessions = AgentLoad.of("s2", TINY).draw(1)
    assert values["prompt_tokens"] == sum(sum(s.prompts) for s in sessions)
    assert 0 < values["cached_share"] <= values["unlimited_share"], "a turn finds the turn before"
    assert metrics["s2.tier_share"] == {"device": values["cached_share"], "host": 0.0, "disk": 0.0}
    assert set(metrics["s2.turn_ttft_ms_p50"]) == {"1", "2", "3"} and len(kept) == 1


def test_a_peer_gets_the_same_prompts(quick):
    options = {"max_model_len": 192}
    table = {
        "shape": "small",
        "repeats": 2,
        "settings": {"num_threads": 1, "device": "cpu", **options},
        "peer": {"name": "vllm", "repeats": [2, 0], "options": options},
        "agents": {"s2": TINY | {"forks": 1.0, "agents": 1, "agent_turns": 1}},
    }
    found = agents.measure(parse("c", table), site=SITE)
    check(found)
    ours, theirs = (entry["metrics"] for entry in found["arms"])
    assert [entry["name"] for entry in found["arms"]] == ["kvasir", "vllm"]
    for name in ("turns", "prompt_tokens"):
        assert ours[f"s2.{name}"] == theirs[f"s2.{name}"]
    assert ours["s2.turns"]["values"] == [10, 10], "three turns and two sub-agents each"
    first, second = ours["s2.prompt_tokens"]["values"]
    assert first != second, "each run draws other sessions"
    assert set(found["targets"]) == {f"s2.{metric} kvasir/vllm" for metric in agents.NO_WORSE}
    with pytest.raises(ConfigError, match="no agents 's3'; there are s2"):
        agents.measure(parse("c", table), site=SITE, only=["s3"])


def test_a_server_with_failures(fake):  # noqa: F811
    """Every third turn fails; the session goes on with its own answer, and prompts grow as if it had not."""
    usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
    fake.behaviour = lambda number: (
        503 if number % 3 == 0 else [chunk("a"), chunk("b"), {"choices": [], "usage": usage}]
    )
    load = AgentLoad.of("f", TINY | {"output": 2, "forks": 1.0})
    values = agents.drive(fake.url, load, 1)
    sessions = load.draw(1)
    assert values["turns"] == sum(len(s.prompts) for s in every(sessions)) == 30
    assert values["failed"] == 10 and values["short"] == 0 and values["cached_tokens"] == 20 * 16
    sent = {json.dumps(body["prompt"]) for body in fake.bodies}
    assert sent == {json.dumps(s.prompt(t)) for s in every(sessions) for t in range(len(s.prompts))}
    assert all(body["ignore_eos"] and body["max_tokens"] == 2 for body in fake.bodies)
    fake.behaviour = lambda number: 500
    with pytest.raises(ConfigError, match="no turn of the load succeeded"):
        agents.drive(fake.url, load, 1)


def test_the_time_of_a_load_is_kept(fake):  # noqa: F811
    fake.behaviour = lambda number: [chunk("a"), {"choices": [], "usage": {"completion_tokens": 1}}]
    cut = TINY | {"output": 1, "turns": 20, "pause": 0.1, "seconds": 1.0}
    values = agents.drive(fake.url, AgentLoad.of("f", cut), 1)
    assert 0 < values["turns"] < 40 and values["failed"] == 0
    with pytest.raises(ConfigError, match="no turn started within the seconds of the load"):
        agents.drive(fake.url, AgentLoad.of("f", cut | {"pause": 1000.0, "seconds": 0.001}), 1)


def test_prompts_must_fit_the_context(quick):
    table = {"shape": "small", "settings": {"device": "cpu", "max_model_len": 64}, "agents": {"s2": TINY}}
    with pytest.raises(
        ConfigError, match=r"agents s2: a prompt and its answer may have \d+ tokens, and max_model_len=64"
    ):
        agents.measure(parse("c", table))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"traces": {"t": {"file": "f", "rate": 1.0}}}, "one of the three"),
        ({"rounds": 2}, "go through servers"),
        ({"arms": {"a": {}, "b": {"shape": "llama-8b-mla"}}}, "one shape"),
        ({"agents": {"s": {"turn": 3}}}, "no key 'turn'"),
    ],
)
def test_bad_cases(change, message):
    with pytest.raises(ConfigError, match=message):
        parse("c", {"shape": "llama-8b", "agents": {"s": {}}} | change)


def test_stored_cases_fit_their_servers():
    files = sorted((ROOT / "bench" / "cases").glob("agents-*.toml"))
    cases = {file.stem: case.read(file) for file in files}
    for found in cases.values():
        for n, load in found.agents.items():
            agents._check_length(n, load, [*found.arms.values(), *([found.peer.options] if found.peer else [])])
    assert [load.sessions for load in cases["agents-llama-8b"].agents.values()] == [16, 64, 128]
    assert cases["agents-cpu"].model == "nano" and cases["agents-policies"].shape == agents.SHAPE


def test_the_command_simulates_a_load_and_a_case(kvasir, tmp_path):  # noqa: F811
    output = tmp_path / "out.json"
    options = "--simulate --sessions 3 --turns 3 --result 300 --output-tokens 4 --num-pages 200".split()
    done = kvasir("bench", "agents", *options, "--json", str(output))
    assert done.code == 0, done.err
    found = json.loads(output.read_text())
    check(found)
    assert found["case"] == "agents-s3-simulated" and found["arms"][0]["metrics"]["s3.cache_tokens"] == 199 * 64, (
        "page 0 is never handed out"
    )
    small = tmp_path / "small.toml"
    small.write_text('shape = "llama-8b"\n[agents.s2]\nsessions = 2\nturns = 2\noutput = 4\n')
    done = kvasir("bench", "agents", "--case", str(small), "--simulate", "--json", str(output))
    assert done.code == 0, done.err
    assert json.loads(output.read_text())["case"] == "small-simulated"


def test_bench_run_takes_such_a_case(kvasir, monkeypatch):  # noqa: F811
    seen = []
    monkeypatch.setattr(agents, "run_case", lambda found, **options: seen.append((found.name, options)))
    done = kvasir("bench", "run", ROOT / "bench/cases/agents-cpu.toml", "--only", "s6", "--no-peer")
    assert done.code == 0, done.err
    [(name, options)] = seen
    assert name == "agents-cpu" and options["only"] == ["s6"] and not options["simulated"] and not options["peer"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--url http://x --shape llama-8b", "shape is for a server that is started here"),
        ("--url http://x --simulate", "simulate is for a server that is started here"),
        ("--case CASE --sessions 3", "sessions stands in the case"),
        ("--case CASE --max-num-seqs 3", "max_num_seqs stands in the case"),
        ("--only s16", "give the file with --case"),
        ("--simulate --shape qwen3-0.6b", "the shape llama-8b alone"),
        ("--simulate --peer vllm", "has no peer"),
    ],
)
def test_refusals_of_the_command(options, message, kvasir):  # noqa: F811
    words = [str(ROOT / "bench/cases/agents-llama-8b.toml") if w == "CASE" else w for w in options.split()]
    done = kvasir("bench", "agents", *words)
    assert done.code == 2 and message in " ".join(done.err.split())
