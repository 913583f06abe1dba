"""A pytest plugin for `make test-fast`: only the files in FAST, and `import torch` fails.

    python -m pytest -p tests.no_torch

What these files test runs in processes that never import torch (the HTTP server, the client, the command line). A file
belongs here when it passes without torch in seconds.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
FAST = [
    "api/test_bad_input.py",
    "api/test_detokenize.py",
    "api/test_log_stats.py",
    "api/test_reasoning.py",
    "api/test_responses.py",
    "api/test_tools.py",
    "bench/test_traces.py",
    "client/test_admission.py",
    "client/test_ipc.py",
    "client/test_journal.py",
    "client/test_pieces.py",
    "cluster/test_placement.py",
    "cluster/test_routers.py",
    "engine/test_sizing.py",
    "engine/test_step_time.py",
    "models/test_checkpoint.py",
    "scaling/test_http_endpoint.py",
    "scaling/test_lab_prompts.py",
    "scaling/test_pool.py",
    "scaling/test_replicas.py",
    "test_config.py",
    "test_errors.py",
]


class Refused(MetaPathFinder):
    """Refuses to import torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("`make test-fast` runs what needs no torch, and something imports it")
        return None


def pytest_configure(config):
    if missing := [name for name in FAST if not (ROOT / name).is_file()]:
        raise pytest.UsageError(f"tests/no_torch.py names files that are not there: {', '.join(missing)}")
    sys.meta_path.insert(0, Refused())


def pytest_ignore_collect(collection_path, config):
    """Leave out every test file that FAST does not name, and every folder without one: its conftest may need torch."""
    name = collection_path.relative_to(ROOT).as_posix() if collection_path.is_relative_to(ROOT) else "."
    if collection_path.is_dir():
        return None if name == "." or any(file.startswith(f"{name}/") for file in FAST) else True
    return None if name in FAST else True
