"""vLLM's API server as a process: ``python -m kvasir.bench.peers.vllm_server`` with its own flags.

It imports uvloop and has no way to do without. Where that is not installed it gets the standard library's loop under
the same name, and says so: its figures are then a little worse than they could be. Its engine process imports this
module again, and finds it, too.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import runpy
import sys
import types

if importlib.util.find_spec("uvloop") is None:
    print("uvloop is not installed here: vLLM's server runs on asyncio's own loop", file=sys.stderr)
    stand_in = types.ModuleType("uvloop")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("uvloop", None)  # for who asks whether there is one
    stand_in.run = asyncio.run  # type: ignore[attr-defined]
    sys.modules["uvloop"] = stand_in

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
