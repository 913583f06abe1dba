"""A driver's side of the pipe: JSON lines in, JSON lines out. Standard library only, since a peer brings its own
packages.

    {"op": "start", "model": FOLDER, "options": {...}}    -> {"start_s", "vocab_size", "version"}
    {"op": "prompts", "ids": [[...], ...]}                -> {}
    {"op": "generate", "num_tokens": n}                   -> {"seconds", "counts"}: the latest prompts and n tokens each
    {"op": "generate", "num_tokens": n, "stop": [...]}    -> {"seconds", "counts", "outputs"}: until one of these ids
    end of input                                          the driver ends

An answer {"error": text} means that the command failed. What the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Completes prompts and returns the counts of the run, if any. A third argument holds the ids that end an answer; the
# counts then hold the answers as ``outputs``.
Generate = Callable[..., dict[str, Any] | None]


def serve(
    start: Callable[[str, dict[str, Any]], tuple[Generate, dict[str, Any]]], rest: Callable[[], None] = lambda: None
) -> None:
    """Answer commands until the input ends.

    ``start(model, options)`` returns the engine's ``generate`` and facts about it. ``rest`` does what the engine's
    server would do between requests.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a stray print must not look like an answer
    generate: Generate | None = None
    prompts: list[list[int]] = []
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            started = time.perf_counter()
            if command["op"] == "start":
                generate, facts = start(command["model"], command["options"])
                answer = {**facts, "start_s": round(time.perf_counter() - started, 2)}
            elif command["op"] == "prompts":
                prompts = command["ids"]
                rest()
            else:
                assert command["op"] == "generate" and generate is not None, command["op"]
                counts = (
                    generate(prompts, command["num_tokens"], *([command["stop"]] if "stop" in command else [])) or {}
                )
                answer = {
                    "seconds": time.perf_counter() - started,
                    "outputs": counts.pop("outputs", None),
                    "counts": counts,
                }
        except Exception as e:  # whatever the engine raises is the answer
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers)
