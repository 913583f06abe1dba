"""A load: which requests of a trace arrive, how fast, and what is asked of their latencies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench import traces
from kvasir.bench.client import Call
from kvasir.errors import ConfigError, nearest
from kvasir.logs import log

# Bounds of a load that must be no worse than the peer's. Below its capacity a server completes whatever comes in, the
# same requests on both sides, so throughput can only be lost: 0.995 is the smallest ratio that rounds to 1.00x.
NO_WORSE = {
    "at_most": {"ttft_ms_p50": 1.0, "ttft_ms_p99": 1.0, "itl_ms_p99": 1.0},
    "at_least": {"output_tok_s": 0.995, "capacity_requests_s": 1.0},
}
# Metrics that a target may name. A target on any other name would never be judged, and so never missed.
METRICS = (
    *(f"{name}_ms_p{share}" for name in ("ttft", "itl") for share in (50, 90, 99)),
    *(f"{name}_ms_p{share}" for name in ("tpot", "e2e") for share in (50, 99)),
    "output_tok_s",
    "requests_s",
    "cached_tokens",
    "capacity_requests_s",
)


@dataclass(frozen=True, slots=True)
class Load:
    """One stream of requests: a trace file, how fast it arrives, and how much of it."""

    name: str
    file: str
    rate: float | None = None  # requests a second; None: as recorded, or by share
    share: float | None = None  # share of the peer's capacity, as the rate
    arrivals: str = "poisson"  # or "recorded"
    num_requests: int = 1000  # least number of requests in a window
    seconds: float = 60.0  # least length of a window
    clip: int | None = None  # most tokens of a prompt
    scale: float = 1.0  # factor of all lengths, for models with a short context
    windows: int | None = None  # most windows in one life of a server; None: as many as the case repeats
    # "at_most" and "at_least" -> metric -> ratio to the peer.
    targets: dict[str, dict[str, float]] = field(default_factory=lambda: NO_WORSE)

    @classmethod
    def of(cls, name: str, table: dict[str, Any]) -> Load:
        """Make the load from a case's table. Raises ConfigError."""
        keys = [f.name for f in dataclasses.fields(cls) if f.name != "name"]
        for key in table:
            if key not in keys:
                raise ConfigError(f"trace {name} has no key '{key}'.{nearest(key, keys)}")
        if "file" not in table:
            raise ConfigError(f"trace {name} names no file")
        for key in ("rate", "share", "scale", "clip", "windows"):
            if (value := table.get(key)) is not None and (type(value) not in (int, float) or not value > 0):
                raise ConfigError(f"trace {name}: {key}={value!r}: expected a number above 0")
        load = cls(name, **table)
        if load.rate and load.share:
            raise ConfigError(
                f"trace {name}: both a rate and a share of the peer's capacity set the rate: give one of them"
            )
        if load.arrivals not in ("poisson", "recorded"):
            raise ConfigError(f"trace {name}: arrivals '{load.arrivals}' are neither poisson nor recorded")
        if odd := [kind for kind in load.targets if kind not in NO_WORSE]:
            raise ConfigError(f"trace {name}: targets are at_most or at_least, not '{odd[0]}'")
        if odd := [metric for metrics in load.targets.values() for metric in metrics if metric not in METRICS]:
            raise ConfigError(f"trace {name}: no target can name '{odd[0]}'.{nearest(odd[0], METRICS)}")
        if load.arrivals == "poisson" and load.rate is None and load.share is None:
            raise ConfigError(f"trace {name}: Poisson arrivals need a rate, or a share of the peer's capacity")
        return load

    @property
    def stream(self) -> tuple[Any, ...]:
        """Key of the server's capacity: loads with the same key differ only in their arrivals."""
        return self.file, self.scale, self.clip

    def trace(self, data: Path) -> list[traces.Recorded]:
        return traces.scaled(traces.read(data / self.file), self.scale, self.clip)

    def calls(self, trace: list[traces.Recorded], rate: float | None) -> list[Call]:
        due = traces.schedule(
            trace, arrivals=self.arrivals, rate=rate, num_requests=self.num_requests, seconds=self.seconds
        )
        if len(due) == len(trace) and due[-1] and (len(due) < self.num_requests or due[-1] < self.seconds):
            log.warning(
                "trace %s: all of its %d requests make a window of %.0f s, where %d requests and %.0f s were asked for",
                self.name,
                len(due),
                due[-1],
                self.num_requests,
                self.seconds,
            )
        return [Call(at, traces.prompt_ids(r, i, self.scale), r.output) for i, (at, r) in enumerate(zip(due, trace))]

    def bounds(self) -> dict[str, dict[str, float]]:
        metrics = dict.fromkeys(metric for bounds in self.targets.values() for metric in bounds)
        return {
            f"{self.name}.{metric}": {kind: bounds[metric] for kind, bounds in self.targets.items() if metric in bounds}
            for metric in metrics
        }
