"""A pytest plugin for `make test-fast`: only the files in FAST, and `import torch` fails.

    python -m pytest -p tests.no_torch

What these files test runs in processes that never import torch (the HTTP server, the client, the command line). A file
belongs here when it passes without torch in seconds.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ROOT = Path(__file__).parent
FAST: list[str] = []


class Refused(MetaPathFinder):
    """Refuses to import torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("`make test-fast` runs what needs no torch, and something imports it")
        return None


def pytest_configure(config):
    sys.meta_path.insert(0, Refused())


def pytest_ignore_collect(collection_path, config):
    """Leave out every test file that FAST does not name."""
    name = collection_path.relative_to(ROOT) if collection_path.is_relative_to(ROOT) else collection_path
    return None if collection_path.suffix != ".py" or str(name) in FAST else True
