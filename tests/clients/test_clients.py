"""Real clients, pinned, against ``kvasir serve nano``; skipped where `make clients` has not installed them.

Each check of ``checks/`` is a test here. The clients run in an environment of their own, one process a file.
"""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.environment import FOLDER, NODE_MODULES, PYTHON, missing
from tests.integration.serving import Served

pytestmark = pytest.mark.slow
FILES = sorted((FOLDER / "checks").glob("*.*"))
CHECKS = [
    (file.name, name)
    for file in FILES
    for name in re.findall(r"^(?:def |  async )(check_\w+)\(", file.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def results(served):
    """Results of one file of checks: what failed, by name."""

    @functools.cache
    def of(name: str) -> dict[str, str | None]:
        file = FOLDER / "checks" / name
        if file.suffix == ".mjs":  # modules are looked for next to the file that imports them
            script = NODE_MODULES.parent / name
            script.write_text(file.read_text())
            command = ["node", str(script), served.url]
        else:
            command = [str(PYTHON), str(FOLDER / "run.py"), str(file), served.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        last = re.findall(r"^RESULTS (.*)$", done.stdout, re.MULTILINE)
        assert last, f"{name} did not run:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(last[-1])

    return of


def test_every_client_has_checks():
    assert len(CHECKS) > 40 and {name for name, _ in CHECKS} == {f.name for f in FILES}


@pytest.mark.parametrize("file, check", CHECKS)
def test_client(file, check, request):
    if reason := missing(Path(file).suffix):
        pytest.skip(reason)
    failed = request.getfixturevalue("results")(file)[check]
    assert failed is None, failed
