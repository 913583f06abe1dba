"""Stand-in for ``vllm serve``: it writes down what it was asked for, and serves as one engine does if it has a port."""

import os
import runpy
import sys

from vllm import note


class ServeSubcommand:
    @staticmethod
    def cmd(options):
        start = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        note(op="vllm serve", engines=options.data_parallel_size, checked=options.checked, start=start)
        if "--port" in sys.argv:
            at = sys.argv.index("--data-parallel-size")
            del sys.argv[at : at + 2]
            runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
