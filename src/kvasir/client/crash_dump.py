"""Crash dumps: what an engine process did in its last steps, as a JSON file that holds no text and no token.

A dump has the last launches from the flight record, the requests that the process held as numbers (lengths, sampling
parameters, how often they were at work in a crash), the latest statistics, the settings, and where the exception was
raised. Whoever reports a crash can attach it as it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kvasir.client.child import Child
from kvasir.client.journal import Entry
from kvasir.config import EngineConfig
from kvasir.logs import log
from kvasir.types import EngineStats, SamplingParams

PREFIX = "kvasir-crash-"
# Dumps that one server writes at most: a crash that comes again and again must not fill the disk.
MAX_DUMPS = 16
# Sampling parameters that are numbers or names of ours: texts and token ids of a client never get into a dump.
PARAMETERS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "logprobs_mode",
    "num_draft_tokens",
    "drafter",
    "confidence",
    "score_from",
    "finish_after",
    "kv_policy",
)


def keep(child: Child, why: str, entries: Iterable[Entry], stats: EngineStats, config: EngineConfig) -> None:
    """Write the dump of a process that died, unless that is switched off, and log where it is. A full disk must not
    keep the requests from going on."""
    folder = config.service.crash_dumps
    if folder == "":
        return
    try:
        file = write(folder, child, why, entries, stats, config)
        log.error("the last steps of the engine process are in %s (numbers only, no prompts)", file)
    except OSError as e:
        log.error("the crash dump could not be written to %s: %s", folder or tempfile.gettempdir(), e)


def write(
    folder: str | None, child: Child, why: str, entries: Iterable[Entry], stats: EngineStats, config: EngineConfig
) -> Path:
    """Write the dump of a process that was reaped, readable by its owner only, and return the file. Raises OSError.

    ``folder`` None: the system's folder for temporary files. ``why``: what the client knows about the end.
    """
    facts = {
        "kvasir": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "end": child.obituary() if not child.crash else child.obituary().partition(":")[0],
        "why": why,
        "exception": _exception(child.crash),
        "steps": _steps(child),
        "requests": [_request(entry, child.at_work) for entry in entries],
        "statistics": msgspec.to_builtins(stats),
        "settings": _settings(config),
    }
    handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S-')}", suffix=".json", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
    return Path(name)


def version() -> str:
    """The installed version of kvasir."""
    try:
        return metadata.version("kvasir")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from its sources


def _exception(traceback: str) -> dict[str, Any] | None:
    """The type of the exception and the places in the code that it passed. Its message may quote a request."""
    if not traceback:
        return None
    lines = traceback.strip().splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), "")
    return {"type": last.partition(":")[0], "frames": [line.strip() for line in lines if line.startswith('  File "')]}


def _steps(child: Child) -> list[dict[str, Any]]:
    """The last launches, oldest first. ``before_end``: seconds from the launch until the process was found dead."""
    return [
        {
            "step": launch.step,
            "before_end": round(child.ended - launch.seconds, 6),
            "rows": launch.rows,
            "spans": launch.spans,
            "slow": launch.slow,
            "first_spans": [{"ticket": t, "start": start, "length": length} for t, start, length in launch.kept],
        }
        for launch in child.launches
    ]


def _request(entry: Entry, at_work: list[int] | None) -> dict[str, Any]:
    request, params = entry.request, entry.request.params
    return {
        "ticket": entry.ticket,
        "at_work": entry.holder is not None if at_work is None else entry.ticket in at_work,
        "submitted": entry.holder is not None,
        "crashes_before": entry.crashes,
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": [len(tokens) for tokens in request.emitted],
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "grammar": params.grammar and params.grammar.kind,
        **{name: getattr(params, name) for name in PARAMETERS},
        "others": _others(params),
    }


def _others(params: SamplingParams) -> list[str]:
    """Names of the parameters that were given and are left out here, because their values may hold text or tokens."""
    usual = SamplingParams()
    names = {f.name for f in dataclasses.fields(params)} - {*PARAMETERS, "max_tokens", "grammar"}
    return sorted(name for name in names if getattr(params, name) != getattr(usual, name))


def _settings(config: EngineConfig) -> dict[str, Any]:
    settings = msgspec.to_builtins(config.engine_only())
    if settings["model"]["chat_template"]:
        settings["model"]["chat_template"] = "given"  # a file, or the text itself
    return settings
