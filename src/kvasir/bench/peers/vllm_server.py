"""vLLM's API server as a process: ``python -m kvasir.bench.peers.vllm_server`` with vLLM's own flags.

vLLM's server cannot run without uvloop. Where uvloop is not installed, this module puts the standard library's event
loop in its place and says so; the server's figures are then a little worse than they could be. vLLM's engine process
imports this module again and finds the replacement, too.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import runpy
import sys
import types

from kvasir.bench.peers.vllm_kernels import turn_off

if importlib.util.find_spec("uvloop") is None:
    print("uvloop is not installed here: vLLM's server runs on asyncio's own loop", file=sys.stderr)
    stand_in = types.ModuleType("uvloop")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("uvloop", None)  # for code that checks whether uvloop exists
    stand_in.run = asyncio.run  # type: ignore[attr-defined]
    sys.modules["uvloop"] = stand_in

if __name__ == "__main__":
    if (changed := turn_off({})) and "--additional-config" not in sys.argv:
        sys.argv += ["--additional-config", json.dumps(changed["additional_config"])]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
