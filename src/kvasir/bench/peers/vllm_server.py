"""vLLM's API server as a process: ``python -m kvasir.bench.peers.vllm_server`` with vLLM's own flags.

vLLM's server cannot run without uvloop. Where uvloop is not installed, this module puts the standard library's event
loop in its place and says so; the server's figures are then a little worse than they could be. vLLM's engine process
imports this module again and finds the replacement, too.

With ``--data-parallel-size`` the server is what ``vllm serve`` makes of it: an API server for each engine, which share
one port.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import os
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


def serve_parallel() -> None:
    """Do what ``vllm serve`` does with the flags of this process. Its command line starts engines by ``spawn``."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(options)
    ServeSubcommand.cmd(options)


if __name__ == "__main__":
    if (changed := turn_off({})) and "--additional-config" not in sys.argv:
        sys.argv += ["--additional-config", json.dumps(changed["additional_config"])]
    if "--data-parallel-size" in sys.argv:
        serve_parallel()
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
