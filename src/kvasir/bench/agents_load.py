"""A load of agents: sessions whose prompts grow turn by turn, with pauses while tools run and with sub-agents.

A session's first prompt is the system prompt, which all sessions share, and a task of its own. Each later prompt is the
one before it, the answer to that, and what a tool returned. The answers in the history are drawn like everything else:
every engine gets the same prompts, whatever it generates, and an answer that it generated itself is never found again.
After some turns a session starts sub-agents. They begin with its history, and its next turn waits for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvasir.bench.traces import IDS
from kvasir.errors import ConfigError, nearest

# Range of a drawn length, as shares of its mean.
LEAST, MOST = 0.5, 1.5
# Least value of each whole number of a load.
WHOLE = {"sessions": 1, "turns": 1, "system": 0, "task": 1, "result": 1, "output": 1, "agents": 1, "agent_turns": 1}


@dataclass(slots=True)
class Session:
    """A session or a sub-agent. Its prompts are beginnings of ``history``: that of turn t has ``prompts[t]`` tokens.

    ``pauses``: seconds before each turn, in which a tool runs. ``agents``: by turn, the sub-agents that start when the
    turn is answered; the pause before the next turn begins when they have ended. ``depth``: 0 for a session, 1 for a
    sub-agent.
    """

    name: str
    depth: int
    history: array
    prompts: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    agents: dict[int, list[Session]] = field(default_factory=dict)

    def prompt(self, turn: int) -> list[int]:
        return self.history[: self.prompts[turn]].tolist()


def every(sessions: Iterable[Session]) -> Iterator[Session]:
    """The sessions, each followed by its sub-agents."""
    for session in sessions:
        yield session
        for agents in session.agents.values():
            yield from every(agents)


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Number of sessions, and the lengths by which they are drawn, in tokens.

    Those of tasks and results are means: each is drawn between half of it and one and a half.
    """

    name: str
    sessions: int = 16
    turns: int = 12
    system: int = 2000
    task: int = 2000
    result: int = 3500
    output: int = 128
    pause: float = 3.0  # mean seconds of an exponential distribution
    forks: float = 0.05  # share of the turns after which sub-agents start
    agents: int = 2  # sub-agents that start together
    agent_turns: int = 3
    seed: int = 0
    seconds: float = 0.0  # no turn starts after so many seconds; 0: all sessions run to their ends

    @classmethod
    def of(cls, name: str, table: dict[str, Any]) -> AgentLoad:
        """Make the load from a case's table. Raises ConfigError."""
        keys = [f.name for f in dataclasses.fields(cls) if f.name != "name"]
        for key, value in table.items():
            if key not in keys:
                raise ConfigError(f"agents {name} have no key '{key}'.{nearest(key, keys)}")
            if key in WHOLE and (type(value) is not int or value < WHOLE[key]):
                raise ConfigError(f"agents {name}: {key}={value!r}: expected a whole number of at least {WHOLE[key]}")
        if type(seed := table.get("seed", 0)) is not int:
            raise ConfigError(f"agents {name}: seed={seed!r}: expected a whole number")
        for key, most in (("pause", float("inf")), ("forks", 1.0), ("seconds", float("inf"))):
            value = table.get(key, 0)
            if type(value) not in (int, float) or not 0 <= value <= most:
                raise ConfigError(f"agents {name}: {key}={value!r}: expected a number from 0 to {most:g}")
        return cls(name, **table)

    @property
    def described(self) -> dict[str, Any]:
        """The load as a result's config has it."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}

    @property
    def longest(self) -> int:
        """Most tokens that a prompt and its answer may have."""
        turn = self.output + int(MOST * self.result)
        own = self.system + int(MOST * self.task) + (self.turns - 1) * turn + self.output
        if not self.forks or self.turns < 2:
            return own
        # The last turn after which sub-agents may start is the last but one.
        return max(own, own - turn + int(MOST * self.task) + (self.agent_turns - 1) * turn + self.output)

    def draw(self, number: int = 0) -> list[Session]:
        """The sessions. They share nothing with those of another ``number``, the system prompt included."""
        system = _tokens(self._random(number, "system"), self.system)
        return [self._session(number, f"session {i}", 0, system, self.turns) for i in range(self.sessions)]

    def _random(self, number: int, what: str) -> random.Random:
        return random.Random(f"{self.seed} {self.name} {number} {what}")

    def _session(self, number: int, name: str, depth: int, base: array, turns: int) -> Session:
        rng = self._random(number, name)
        session = Session(name, depth, base + _tokens(rng, _length(rng, self.task)))
        for turn in range(turns):
            session.prompts.append(len(session.history))
            session.pauses.append(rng.expovariate(1 / self.pause) if self.pause else 0.0)
            if turn == turns - 1:
                break
            session.history += _tokens(rng, self.output)
            if not depth and rng.random() < self.forks:
                session.agents[turn] = [
                    self._session(number, f"{name} turn {turn} agent {i}", 1, session.history[:], self.agent_turns)
                    for i in range(self.agents)
                ]
            session.history += _tokens(rng, _length(rng, self.result))
        return session


def _length(rng: random.Random, mean: int) -> int:
    return max(1, int(rng.uniform(LEAST, MOST) * mean))


def _tokens(rng: random.Random, count: int) -> array:
    return array("i", rng.choices(range(*IDS), k=count))


def page_keys(session: Session, size: int) -> list[bytes]:
    """Keys of the full pages of a session's longest prompt. Two pages have one key where everything up to their ends is
    equal."""
    keys, key = [], b""
    for end in range(size, session.prompts[-1] + 1, size):
        key = hashlib.blake2b(key + session.history[end - size : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def pages_needed(sessions: list[Session], size: int) -> int:
    """Number of pages of ``size`` tokens that hold all prompts at once, each shared page once."""
    return len({key for session in every(sessions) for key in page_keys(session, size)})
