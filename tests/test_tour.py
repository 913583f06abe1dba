"""The tour is where requests go: every stop of docs/tour.md is among the functions that a real request enters."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvasir.kernels.native.library import native
from tools.checkout import python_path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvasir"
START_SECONDS = 60.0
MAX_GPU_ONLY = 2  # stops that no test on a CPU can enter

needs_native = pytest.mark.skipif(
    native().library is None, reason=f"a request on this CPU goes another way: no native kernels: {native().reason}"
)


@dataclass(frozen=True)
class Stop:
    path: str
    functions: tuple[str, ...]
    gpu_only: bool


def stops(text: str) -> list[Stop]:
    """Stops of a tour: numbered lines of a file, functions and a colon; "(only on a GPU)" marks what no CPU enters."""
    found = re.findall(r"^\d+\. `([\w/]+\.py)`((?:, `\w+\(\)`)+)( \(only on a GPU\))?: ", text, re.M)
    assert len(found) == len(re.findall(r"^\d+\. ", text, re.M)), "a stop is not `file`, `function()`: words"
    return [Stop(path, tuple(re.findall(r"`(\w+)\(\)`", names)), bool(mark)) for path, names, mark in found]


def missed(wanted: list[Stop], entered: set[tuple[str, str]]) -> list[str]:
    """Stops that were not entered, as ``file function``."""
    names = [(stop.path, name) for stop in wanted for name in stop.functions if not stop.gpu_only]
    return [f"{path} {name}" for path, name in names if (path, name) not in entered]


CPU, GPU = (stops(part) for part in (ROOT / "docs" / "tour.md").read_text().split("## A decode on a GPU"))


def environment(folder: Path) -> dict[str, str]:
    """Settings under which every process writes to ``folder`` which functions it enters (see tests/recorder)."""
    paths = python_path(str(ROOT / "tests" / "recorder"))
    return os.environ | {"RECORD_ENTERED": str(folder), "PYTHONPATH": paths}


def recorded(folder: Path) -> set[tuple[str, str]]:
    """(file, function) of everything that the processes entered; methods without their class."""
    lines = [line.split(" ", 1) for file in folder.iterdir() for line in file.read_text().splitlines()]
    return {(path, name.rpartition(".")[2]) for path, name in lines}


@pytest.fixture(scope="module")
def request_on_cpu(tmp_path_factory) -> set[tuple[str, str]]:
    """What both processes of `kvasir serve` enter from their start to the end of one streamed chat request."""
    folder, log = tmp_path_factory.mktemp("entered"), tmp_path_factory.mktemp("log") / "server.log"
    command = [sys.executable, "-m", "kvasir.cli.main", "serve", "--port", "0", "--num-threads", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment(folder), stdout=out, stderr=out)
    try:
        url = wait_for(lambda: re.search(r"listening on (http://\S+)", log.read_text()), process, log)[1]
        with httpx.Client(base_url=url, timeout=START_SECONDS) as http:
            wait_for(lambda: http.get("/health/ready").status_code == 200, process, log)
            message = {"role": "user", "content": "Compute modulo 97: start 12; +45."}
            body = {"model": "embedded", "messages": [message], "max_tokens": 8, "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert "[DONE]" in reply.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
    return recorded(folder)


def wait_for(condition, process: subprocess.Popen, log: Path):
    end = time.monotonic() + START_SECONDS
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < end, f"the server did not start:\n{log.read_text()}"
        time.sleep(0.02)
    return found


DECODES = """
from tests.engine.driver import Driver

driver = Driver("nano", static=True)
driver.run([driver.request("r", [5, 6, 7, 8], max_tokens=8, ignore_eos=True)])
assert len(driver.outputs["r", 0].tokens) == 8
"""


@pytest.fixture(scope="module")
def decode_over_static_buffers(tmp_path_factory) -> set[tuple[str, str]]:
    """What decodes enter that run over the static buffers of CUDA graphs, called through instead of captured."""
    folder = tmp_path_factory.mktemp("entered")
    subprocess.run([sys.executable, "-c", DECODES], env=environment(folder), check=True, timeout=START_SECONDS)
    return recorded(folder)


@needs_native
def test_a_request_on_a_cpu_enters_every_stop(request_on_cpu):
    assert len(CPU) >= 20
    assert not missed(CPU, request_on_cpu)


def test_a_decode_on_a_gpu_enters_every_stop(decode_over_static_buffers):
    assert len(GPU) >= 5
    assert not missed(GPU, decode_over_static_buffers)


def test_few_stops_are_left_to_a_gpu():
    """They are not entered here, so at least their functions must exist."""
    marked = [stop for stop in CPU + GPU if stop.gpu_only]
    assert len(marked) <= MAX_GPU_ONLY
    for stop in marked:
        nodes = ast.walk(ast.parse((PACKAGE / stop.path).read_text()))
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert defined.issuperset(stop.functions), f"the tour says that {stop.path} has {stop.functions}"


@needs_native
def test_a_stop_that_no_request_enters_is_found(request_on_cpu):
    """Functions that exist and do not run, and files that do not exist."""
    wrong = "1. `models/decoder.py`, `forward()`: the plain path.\n2. `engine/ways/runner.py`, `launch()`: runs."
    assert missed(stops(wrong), request_on_cpu) == ["models/decoder.py forward"]
    with pytest.raises(AssertionError, match="a stop is not"):
        stops("1. `models/decoder.py`: names no function.")
