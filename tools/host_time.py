"""Compare the host time of a decode step between two checkouts: ``python tools/host_time.py --other SRC --batch 1,16,64
OUT.json``.

Host time is what Python does in a step: plan, pack, launch, commit and events. It is the wall time of ``Engine.step``
minus the time spent in the step handle's ``read`` (the wait for the device) and, on a CPU, in the native decode call.
Each checkout runs in a process of its own. The two take turns, round by round, so that the drift of a busy machine
hits both. The result reports medians of the rounds' fastest quarter, and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent.parent / "src"
WARM_STEPS = 64  # until graphs are captured and clocks settle
STEPS = 32  # timed steps of a round


class Watch:
    """Seconds spent in wrapped calls since ``take``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call):
        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Handle:
    """A step handle whose ``read`` is timed."""

    def __init__(self, handle, watch: Watch) -> None:
        self._handle = handle
        self.read = watch.wrap(handle.read)

    def __getattr__(self, name: str):
        return getattr(self._handle, name)


def work(options: argparse.Namespace) -> None:
    """The worker: build an engine with ``--batch`` sequences that decode, then time a round for every line of stdin."""
    from kvasir import LLM, SamplingParams
    from kvasir.bench.workloads import shape_folder

    try:
        from kvasir.client import admission
    except ImportError:  # checkouts of before the client had a folder of its own
        from kvasir.engine import admission
    from kvasir.config import EngineConfig
    from kvasir.models.native_decoder import NativeDecoder

    with contextlib.ExitStack() as stack:
        batch = options.batch[0]
        settings = {"enable_prefix_caching": False, "max_num_seqs": max(batch, 8)}
        if options.shape:
            folder = stack.enter_context(shape_folder(options.shape))
            settings |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
            settings |= {"gpu_memory_utilization": 0.42}
        watch = Watch()
        NativeDecoder.decode = watch.wrap(NativeDecoder.decode)
        llm = stack.enter_context(LLM(config=EngineConfig().replace(**settings)))
        engine = llm.engine
        launch = engine.runner.launch
        engine.runner.launch = lambda *plan: Handle(launch(*plan), watch)
        longest = llm.info.max_model_len - 16
        params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False)
        draw = random.Random(0)

        def refill() -> None:
            for i in range(batch):
                ids = [draw.randrange(3, llm.info.tokenizer_size) for _ in range(8)]
                now = time.monotonic()
                engine.submit(admission.admit(ids, params, llm.info, id=f"{now}-{i}", arrival=now))
            for _ in range(WARM_STEPS):
                engine.step()
            while engine.idle():
                pass

        refill()
        left = llm.info.max_model_len - WARM_STEPS - 64
        print("ready", flush=True)
        for _ in sys.stdin:
            if left < STEPS:
                while engine.has_work():
                    engine.step()
                refill()
                left = llm.info.max_model_len - WARM_STEPS - 64
            left -= STEPS
            times = []
            for _ in range(STEPS):
                watch.take()
                started = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - started - watch.take())
            print(json.dumps(times), flush=True)


class Worker:
    def __init__(self, src: Path, batch: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--work", "--batch", str(batch)]
        command += ["--shape", options.shape] if options.shape else []
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(src), os.environ.get("PYTHONPATH"))))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.times: list[float] = []

    def ready(self) -> None:
        while self.process.stdout.readline().strip() != "ready":
            if self.process.poll() is not None:
                raise SystemExit("a worker ended before it was ready")

    def round(self) -> None:
        self.process.stdin.write("\n")
        times = sorted(json.loads(self.process.stdout.readline()))
        self.times.append(1e6 * median(times[: len(times) // 4]))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(batch: int, options: argparse.Namespace) -> dict[str, object]:
    workers = {"before": Worker(options.other, batch, options), "after": Worker(HERE, batch, options)}
    for worker in workers.values():
        worker.ready()
    for _ in range(options.rounds):
        for worker in workers.values():
            worker.round()
    for worker in workers.values():
        worker.close()
    found = {name: round(median(worker.times), 2) for name, worker in workers.items()}
    ratios = [b / a for a, b in zip(workers["before"].times, workers["after"].times)]
    print(f"batch {batch}: {found} us, ratio {median(ratios):.3f}", flush=True)
    return {"batch": batch, "host_us": found, "ratio": round(median(ratios), 4), "rounds": options.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", type=Path, help="the JSON to write")
    parser.add_argument("--other", type=Path, help="src folder of the checkout to compare with")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--shape", default="", help="a known shape with random weights instead of the packaged model")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    from kvasir.bench.result import arm, finish, result

    arms = [compare(batch, options) for batch in options.batch]
    entries = [arm(f"batch {a['batch']}", {"shape": options.shape or "base"}, a) for a in arms]
    finish(result("host-time", entries), options.output, None)


if __name__ == "__main__":
    main()
