"""The settings of ``--learn``, and who is learned from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvasir import technique
from kvasir.config import SpeculationConfig
from kvasir.errors import ConfigError
from kvasir.types import Request

ALL = "all"


@dataclass(frozen=True)
class LearnOptions:
    """``device``: where the trainer runs: auto, cpu, cuda:N, or same (the engine's GPU). ``share``: most of that GPU's
    time that it takes there. ``every``: optimizer steps between two versions. ``lam``: weight of rejected drafts."""

    device: str = "auto"
    share: float = 0.1
    every: int = 200
    lam: float = 0.25

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|same|cuda:\d+", self.device):
            raise ConfigError(f"learn:device={self.device}: one of auto, cpu, same (the engine's GPU), cuda:N")
        if not 0 < self.share <= 0.9:
            raise ConfigError(f"learn:share={self.share:g}: more than 0, at most 0.9")
        if self.every < 1:
            raise ConfigError(f"learn:every={self.every}: at least 1")
        if not 0 <= self.lam <= 100:
            raise ConfigError(f"learn:lam={self.lam:g}: from 0 to 100")


def read(config: SpeculationConfig) -> LearnOptions | None:
    """The options of ``--learn``; None: nothing is learned. Raises ConfigError."""
    word, _, rest = config.learn.partition(":")
    if word not in ("on", "off") or (word == "off" and rest):
        raise ConfigError(f"learn={config.learn}: off, or on, or on:device=auto,share=0.1,every=200,lam=0.25")
    if word == "off":
        if config.learn_tenants or config.learn_out:
            raise ConfigError("learn_tenants and learn_out do nothing without --learn on")
        return None
    if not config.drafter:
        raise ConfigError("learn=on trains a drafter, and there is none. Add --drafter eagle, or leave --learn out.")
    if not config.learn_tenants:
        raise ConfigError(
            "learn=on learns from nobody yet: name those who agree with --learn-tenants KEY, or say --learn-tenants all"
        )
    return technique.parse(LearnOptions, "learn", dict(p.partition("=")[::2] for p in rest.split(",") if p))


def agreed(tenants: Iterable[str]) -> Callable[[Any], bool]:
    """Whether a sequence's request is one of these tenants'. ``all``: it always is. A tenant's salts are its own."""
    named = frozenset(tenants)
    if ALL in named:
        return lambda seq: True
    return lambda seq: seq.request.tenant.partition(":")[0] in named


def may_learn(request: Request) -> bool:
    """Whether a request of a tenant who agreed may be learned from: it does not say no, and the model alone computes
    it."""
    return request.params.learn and request.variant is None and request.hook is None and request.pooling is None
