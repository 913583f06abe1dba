"""Loads of agents: drawn by a seed, histories that grow as prefixes, and sub-agents that share them."""

from __future__ import annotations

import dataclasses

import pytest

from kvasir.bench.agents_load import LEAST, MOST, AgentLoad, every, page_keys, pages_needed
from kvasir.errors import ConfigError

LOAD = AgentLoad(
    "l", sessions=4, turns=5, system=40, task=20, result=30, output=8, pause=1.0, forks=0.5, agents=2, agent_turns=2
)


def drawn(sessions):
    return [
        (
            s.name,
            s.depth,
            list(s.history),
            s.prompts,
            s.pauses,
            {t: [a.name for a in part] for t, part in s.agents.items()},
        )
        for s in every(sessions)
    ]


def test_a_load_is_a_function_of_its_seed():
    assert drawn(LOAD.draw(1)) == drawn(LOAD.draw(1))
    for other in (LOAD.draw(2), dataclasses.replace(LOAD, seed=1).draw(1), dataclasses.replace(LOAD, name="m").draw(1)):
        assert other[0].history[:16] != LOAD.draw(1)[0].history[:16], "not even the system prompt is shared"


def test_another_session_more_changes_no_other():
    more = dataclasses.replace(LOAD, sessions=5).draw(1)
    assert drawn(more[:4]) == drawn(LOAD.draw(1)) and len(more) == 5


def test_a_prompt_begins_with_the_one_before_and_its_answer():
    sessions = LOAD.draw(1)
    assert len({tuple(s.prompt(0)[:40]) for s in every(sessions)}) == 1, "the system prompt is everybody's"
    assert len({tuple(s.prompt(0)[40:]) for s in sessions}) == len(sessions), "tasks are not"
    for session in every(sessions):
        assert len(session.prompts) == len(session.pauses) == (LOAD.agent_turns if session.depth else LOAD.turns)
        for turn in range(1, len(session.prompts)):
            before, now = session.prompt(turn - 1), session.prompt(turn)
            assert now[: len(before)] == before
            added = len(now) - len(before) - LOAD.output
            assert LEAST * LOAD.result - 1 <= added <= MOST * LOAD.result, "an answer and a tool's result"


def test_sub_agents_go_on_from_the_session():
    sessions = LOAD.draw(1)
    found = [(s, turn, agents) for s in sessions for turn, agents in s.agents.items()]
    assert found, "some turns start sub-agents"
    for session, turn, agents in found:
        assert turn < LOAD.turns - 1 and len(agents) == LOAD.agents and all(not a.agents for a in agents)
        shared = list(session.history[: session.prompts[turn] + LOAD.output])
        assert all(agent.prompt(0)[: len(shared)] == shared and agent.depth == 1 for agent in agents)
        tasks = {tuple(agent.prompt(0)[len(shared) :]) for agent in agents}
        assert len(tasks) == len(agents) and all(tasks)
    assert not any(s.agents for s in dataclasses.replace(LOAD, forks=0.0).draw(1))


def test_no_prompt_is_longer_than_the_load_says():
    for seed in range(30):
        load = dataclasses.replace(LOAD, seed=seed, agent_turns=1 + seed % 6)
        assert max(s.prompts[-1] for s in every(load.draw(1))) + load.output <= load.longest
    always = dataclasses.replace(LOAD, forks=1.0, sessions=40)
    assert max(s.prompts[-1] for s in every(always.draw(1))) > 0.7 * always.longest, "the bound is not far away"


def test_pages_are_equal_where_everything_before_is():
    sessions = dataclasses.replace(LOAD, forks=0.0, sessions=2).draw(1)
    one, two = (page_keys(s, 8) for s in sessions)
    assert one[:5] == two[:5] and not set(one[5:]) & set(two[5:]), "40 tokens of the system prompt"
    assert pages_needed(sessions, 8) == len(one) + len(two) - 5
    assert len(one) == sessions[0].prompts[-1] // 8


@pytest.mark.parametrize(
    "table, message",
    [
        ({"session": 3}, "no key 'session'.*'sessions'"),
        ({"turns": 0}, "turns=0: expected a whole number of at least 1"),
        ({"output": 1.5}, "output=1.5"),
        ({"forks": 1.5}, "forks=1.5: expected a number from 0 to 1"),
        ({"pause": -1}, "pause=-1"),
        ({"seed": "a"}, "seed='a'"),
    ],
)
def test_bad_loads(table, message):
    with pytest.raises(ConfigError, match=message):
        AgentLoad.of("x", table)
