"""An engine in a process of its own, seen from the benchmark: start a driver of ``bench.peers``, command it, end it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from kvasir.errors import ConfigError, nearest

# The package that each peer needs.
PEERS = {"vllm": "vllm", "transformers": "transformers", "llama_cpp": "llama_cpp"}
# Names that pip needs where they differ from the package.
INSTALLED = {"llama_cpp": "llama-cpp-python gguf"}
# Environment of a peer. Its models are local folders, and it must not look elsewhere. FlashInfer's sampler would be
# compiled at run time, which a machine without a compiler cannot do: vLLM then uses its own.
ALONE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Seconds that a process has to end before it is killed.
END_SECONDS = 60.0


def check_peer(name: str, site: str | None) -> None:
    """Raise ConfigError for a peer that is unknown or not installed. ``site`` is a folder with its packages."""
    if name not in PEERS:
        raise ConfigError(f"no peer named '{name}'; there are {', '.join(PEERS)}.{nearest(name, PEERS)}")
    if site is not None and not (Path(site) / PEERS[name]).is_dir():
        raise ConfigError(f"--peer-python-path {site} has no package '{PEERS[name]}'")
    if site is None and importlib.util.find_spec(PEERS[name]) is None:
        raise ConfigError(
            f"the peer needs its package: pip install {INSTALLED.get(name, name)}, or name a folder that has it with "
            "--peer-python-path"
        )


def environment(site: str | None = None) -> dict[str, str]:
    """Environment of a child process: the peer's packages first, then ours, then those of this process."""
    paths = [site, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return (
        os.environ
        | (ALONE if site else {})
        | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    )


class Worker:
    """One running driver.

    ``facts`` is its answer to ``start``. ``counts`` are those of the latest run by name, if the engine counts anything.
    Leaving the context ends the process and everything it started.
    """

    def __init__(self, name: str, model: str, options: dict[str, Any], site: str | None = None) -> None:
        self.name = name
        self.counts: dict[str, int] = {}
        self._sent: list[list[int]] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"kvasir.bench.peers.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(site),
            start_new_session=True,
        )
        try:
            self.facts = self._ask(op="start", model=model, options=options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds of a run by the driver's own clock, as ``offline.Timed``. Prompts are sent before it starts."""
        if prompts is not self._sent:
            self._ask(op="prompts", ids=prompts)
            self._sent = prompts
        answer = self._ask(op="generate", num_tokens=num_tokens)
        self.counts = answer["counts"]
        return answer["seconds"]

    def complete(self, prompts: list[list[int]], num_tokens: int, stop: list[int]) -> tuple[float, list[list[int]]]:
        """Seconds and answers of a run in which an answer ends at one of the ids ``stop``.

        ``counts`` then has ``drafted``, ``accepted`` and ``verified``, where the engine drafts.
        """
        self._ask(op="prompts", ids=prompts)
        answer = self._ask(op="generate", num_tokens=num_tokens, stop=stop)
        self.counts = answer["counts"]
        return answer["seconds"], answer["outputs"]

    def _ask(self, **command: Any) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ConfigError(
                f"the process of {self.name} ended with code {self._process.wait()}; its last output is above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # an engine process that the driver left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
