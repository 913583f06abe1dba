"""Where the clients are installed: ``make clients`` puts them beside the development environment."""

import shutil
from pathlib import Path

FOLDER = Path(__file__).parent
HOME = FOLDER.parents[1] / ".venv" / "clients"
PYTHON = HOME / "bin" / "python"
NODE_MODULES = HOME / "node_modules"


def missing(suffix: str) -> str:
    """Why checks with this file suffix cannot run; empty when they can."""
    if suffix == ".mjs" and not (NODE_MODULES.is_dir() and shutil.which("node")):
        return "OpenAI's JavaScript client is not installed: run `make clients` on a machine with npm"
    return "" if PYTHON.exists() else "the clients are not installed: run `make clients`"
