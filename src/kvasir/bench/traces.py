"""Request traces: lengths and arrival times of real services, without text. Reads Azure's csv files and Mooncake's JSON
lines.

A trace tells when each request came and how long its prompt and answer were. Prompts are random token ids of that
length. Mooncake also names every block of 512 prompt tokens by a hash id; equal ids become equal tokens, so prefixes
are shared as they were recorded. ``bench/traces`` holds the beginning of each trace (Azure/AzurePublicDataset,
CC-BY-4.0; kvcache-ai/Mooncake, Apache-2.0).
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
from kvasir.plain_files import refuse_special

# Prompt tokens for which one of Mooncake's hash ids stands.
BLOCK = 512
# Range of the token ids of prompts: every vocabulary has them, and none uses them for special tokens.
IDS = (256, 1024)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace: its arrival, and the tokens of its prompt and its output.

    ``at`` is in seconds since the trace began; ``blocks`` are the hash ids of its prompt, where known.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read(path: Path) -> list[Recorded]:
    """Every request of the file with at least one prompt and one output token, by arrival. Raises ConfigError."""
    refuse_special(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode()
        found = _mooncake(text) if text.lstrip().startswith("{") else _azure(text)
    except (OSError, EOFError, zlib.error) as e:  # an incomplete or damaged copy
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
    """Seconds of an Azure timestamp. It has seven decimals, where ``datetime`` takes six."""
    whole, _, decimals = timestamp.partition(".")
    return datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp() + float(f"0.{decimals or 0}")


def _mooncake(text: str) -> list[Recorded]:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        Recorded(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in rows
    ]


def scaled(trace: list[Recorded], scale: float, clip: int | None) -> list[Recorded]:
    """Multiply all lengths by ``scale`` (at least 1 token stays), then cut prompts to at most ``clip`` tokens."""

    def length(tokens: int) -> int:
        return max(1, round(tokens * scale))

    return [Recorded(r.at, min(length(r.prompt), clip or length(r.prompt)), length(r.output), r.blocks) for r in trace]


def prompt_ids(request: Recorded, number: int, scale: float = 1.0) -> list[int]:
    """Token ids of the ``number``-th request, the same in every process.

    They come block by block from the hash ids; without these every request has its own.
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
    """Seconds from the start at which each of the first requests is due.

    There are at least ``num_requests`` of them, and the last is not before ``seconds``, as far as the trace goes.

    ``poisson``: ``rate`` requests a second at exponential distances, in the trace's order. ``recorded``: the trace's
    own times, which keep its bursts; with a ``rate`` they are compressed or stretched as a whole to that mean. An
    infinite ``rate`` means ``num_requests`` at once.
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
