"""Request traces: lengths and arrival times of real services, without text. Azure's csv files and Mooncake's JSON
lines.

A trace gives when each request came and how long its prompt and answer were; prompts are random token ids of that
length. Mooncake also names every block of 512 prompt tokens by a hash id, and equal ids are equal tokens: so prefixes
are shared as they were. ``bench/traces`` holds the beginning of each (Azure/AzurePublicDataset, CC-BY-4.0;
kvcache-ai/Mooncake, Apache-2.0).
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvasir.errors import ConfigError

BLOCK = 512  # prompt tokens that one of Mooncake's hash ids stands for
IDS = (
    256,
    1024,
)  # prompts are drawn from these token ids, which every vocabulary has and none keeps for special tokens


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace.

    ``at`` is in seconds since the trace began; ``blocks`` are hash ids of its prompt, where known.

    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read(path: Path) -> list[Recorded]:
    """Every request of the file that asked for and got at least one token, by arrival. Raises ConfigError."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode()
        found = _mooncake(text) if text.lstrip().startswith("{") else _azure(text)
    except (OSError, EOFError, zlib.error) as e:  # a copy that was cut off, or is damaged
        raise ConfigError(f"cannot read the trace {path}: {getattr(e, 'strerror', None) or e}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is neither a trace of Azure's (csv) nor of Mooncake's (JSON lines): {e!r}") from e
    found = sorted((r for r in found if r.prompt > 0 and r.output > 0), key=lambda r: r.at)
    if not found:
        raise ConfigError(f"{path} holds no request")
    return [Recorded(r.at - found[0].at, r.prompt, r.output, r.blocks) for r in found]


def _azure(text: str) -> list[Recorded]:
    rows = csv.DictReader(io.StringIO(text))
    return [
        Recorded(_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows
    ]


def _seconds(timestamp: str) -> float:
    """Azure writes seven decimals; ``datetime`` takes six."""
    whole, _, decimals = timestamp.partition(".")
    return datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp() + float(f"0.{decimals or 0}")


def _mooncake(text: str) -> list[Recorded]:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        Recorded(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in rows
    ]


def scaled(trace: list[Recorded], scale: float, clip: int | None) -> list[Recorded]:
    """Lengths times ``scale`` (prompt and answer alike, at least 1), then prompts cut to at most ``clip`` tokens."""

    def length(tokens: int) -> int:
        return max(1, round(tokens * scale))

    return [Recorded(r.at, min(length(r.prompt), clip or length(r.prompt)), length(r.output), r.blocks) for r in trace]


def prompt_ids(request: Recorded, number: int, scale: float = 1.0) -> list[int]:
    """Token ids of the ``number``-th request, the same in every process.

    They come block by block from the hash ids, or are all its own.
    """
    if not request.blocks:
        return _draw(number, 0, request.prompt)
    size = max(1, round(BLOCK * scale))
    ids = [token for block in request.blocks[: -(-request.prompt // size)] for token in _draw(block, 1, size)][
        : request.prompt
    ]
    return ids + _draw(number, 0, request.prompt - len(ids))


def _draw(number: int, kind: int, count: int) -> list[int]:
    return np.random.default_rng([kind, number]).integers(*IDS, count).tolist() if count > 0 else []


def schedule(
    trace: list[Recorded], *, arrivals: str, rate: float | None, num_requests: int, seconds: float
) -> list[float]:
    """When each of the first requests is due, in seconds: as many as make ``num_requests``, the last not before
    ``seconds``.

    ``poisson``: ``rate`` requests a second at exponential distances, in the trace's order. ``recorded``: the trace's
    own times, compressed or stretched as a whole to a mean of ``rate`` if one is given, which keeps its bursts.
    ``rate`` infinite: all at once, ``num_requests`` of them.
    """
    if rate == float("inf"):
        return [0.0] * min(num_requests, len(trace))
    if arrivals == "poisson":
        if not rate:
            raise ConfigError("Poisson arrivals need a rate")
        rng, times = random.Random(0), [0.0]
        while len(times) < len(trace) and (len(times) < num_requests or times[-1] < seconds):
            times.append(times[-1] + rng.expovariate(rate))
        return times
    if arrivals != "recorded":
        raise ConfigError(f"arrivals '{arrivals}' are neither poisson nor recorded")
    factor = 1.0
    if rate and trace[-1].at:
        factor = (len(trace) - 1) / trace[-1].at / rate
    times = [r.at * factor for r in trace]
    enough = next((i for i, at in enumerate(times, start=1) if i >= num_requests and at >= seconds), len(times))
    return times[:enough]
