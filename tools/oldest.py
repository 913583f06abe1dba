"""Run the tests that touch each dependency with the oldest versions that pyproject.toml allows.

    python -m tools.oldest                     all of them, and keep the record in tools/oldest.json
    python -m tools.oldest --only llguidance   one of them, without a record
    python -m tools.oldest --folder FOLDER     where the environment is made; default: .venv-oldest

The environment has every dependency and extra at its lower bound, and what the tests need at the versions of
constraints.txt. torch is the one that runs this, since old builds for CPUs are hard to come by. Raise a bound, or
repair the code, until this passes; tests/test_installation.py compares the record with the bounds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvasir import records
from tools import checkout

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tools" / "oldest.json"
# PyTorch's own index of builds for CPUs, where the configured one has none.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# What these tests need. transformers, schemathesis and others are left out: they ask for new versions of the rest.
TOOLS = ("pytest", "hypothesis", "httpx", "jsonschema", "psutil", "PyYAML", "triton")
# Dependencies that are not brought to their bound here, and why the bound is what it is.
UNTESTED = {
    "torch": "2.11 is the oldest with which the tests and the measurements of a GPU have run",
    "humming-kernels": "runs on a GPU alone; 0.1.19 is what was measured",
    "fla-core": "runs on a GPU alone; fla.backends, which is used, came with 0.6.0",
}
# The tests that touch each dependency.
TESTS = {
    "numpy": ("tests/lab/test_statistics.py", "tests/speculation/test_suffixes.py"),
    "safetensors": ("tests/models/test_stored.py", "tests/models/test_strangers.py", "tests/convert/test_lora.py"),
    "tokenizers": (
        "tests/models/test_gguf_tokenizer.py",
        "tests/models/test_text_stream.py",
        "tests/decoding/test_added_text.py",
    ),
    "huggingface-hub": ("tests/models/test_checkpoint.py",),
    "jinja2": ("tests/models/test_strangers.py", "tests/lab/test_tokenizer.py"),
    "llguidance": (
        "tests/decoding/test_grammar.py",
        "tests/decoding/test_grammar_process.py",
        "tests/decoding/test_grammar_refusals.py",
        "tests/decoding/test_json_schema.py",
        "tests/decoding/test_exact_schema.py",
        "tests/decoding/test_number_ranges.py",
        "tests/decoding/test_one_of.py",
        "tests/api/test_constrained.py",
    ),
    "msgspec": ("tests/client/test_ipc.py", "tests/client/test_journal.py", "tests/learn/test_online.py"),
    "fastapi": ("tests/api/test_server.py", "tests/api/test_not_found.py"),
    "starlette": ("tests/api/test_server.py", "tests/api/test_hosts.py"),
    "pydantic": ("tests/api/test_bad_input.py", "tests/api/test_messages.py", "tests/api/test_responses.py"),
    "uvicorn": ("tests/api/test_server_disconnect.py", "tests/api/test_keys.py"),
    "httptools": ("tests/api/test_bad_input.py", "tests/api/test_server_disconnect.py"),
    "prometheus-client": ("tests/api/test_small_routes.py",),
    "typer": ("tests/cli/test_options.py", "tests/cli/test_serve.py"),
    "rich": ("tests/cli/test_show_doctor.py", "tests/cli/test_chat.py"),
    "gguf": ("tests/models/test_gguf_tokenizer.py", "tests/bench/test_gguf.py"),
    "matplotlib": ("tests/bench/test_plots.py",),
    "pillow": ("tests/bench/test_plots.py",),
    "opentelemetry-sdk": ("tests/api/test_tracing.py",),
    "opentelemetry-exporter-otlp-proto-http": ("tests/api/test_tracing.py",),
    "pyzmq": ("tests/client/test_kv_events.py",),
    "ray": ("tests/cluster/test_ray.py",),
    "cryptography": ("tests/cluster/test_remote.py",),
}
# Dependencies whose tests are marked as slow.
SLOW = ("ray",)


def bounds(project: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """The lower bound of every dependency and of every extra but that of developers. Raises ValueError for one without
    a bound."""
    found = tomllib.loads(project.read_text())["project"]
    extras = found["optional-dependencies"]
    named = [*found["dependencies"], *(need for name, needs in extras.items() if name != "dev" for need in needs)]
    lowest = {}
    for requirement in map(Requirement, named):
        least = [one.version for one in requirement.specifier if one.operator == ">="]
        if len(least) != 1:
            raise ValueError(f"{requirement} needs one lower bound")
        lowest[canonicalize_name(requirement.name)] = least[0]
    return lowest


def constraints() -> dict[str, str]:
    """The versions that development is known to work with."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def make(folder: Path, oldest: dict[str, str]) -> Path:
    """Make the environment, and return its interpreter. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    torch, known = f"torch=={importlib.metadata.version('torch')}", constraints()
    tools = [f"{name}=={known[canonicalize_name(name)]}" for name in TOOLS]
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if subprocess.run([*install, torch]).returncode:
        subprocess.run([*install, torch, "--extra-index-url", TORCH_INDEX], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join([torch, *(f"{name}=={version}" for name, version in oldest.items())]) + "\n")
        pins.flush()
        wanted = [f"{name}=={version}" for name, version in oldest.items()]
        subprocess.run([*install, "-c", pins.name, *wanted, *tools], check=True)
    return python


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-oldest")
    parser.add_argument("--only", choices=sorted(TESTS), help="run the tests of one dependency, and keep no record")
    options = parser.parse_args(given)
    oldest = {name: version for name, version in bounds().items() if name not in UNTESTED}
    python = make(options.folder, oldest)
    names = [options.only] if options.only else list(TESTS)
    path = os.pathsep.join(checkout.PATHS)
    # The tests start commands of their own, which have to find the same interpreter.
    environment = {**os.environ, "PYTHONPATH": path, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command, status = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m"], 0
    for mark, part in (("not slow and not gpu", set(names) - set(SLOW)), ("not gpu", set(names) & set(SLOW))):
        if files := sorted({file for name in part for file in TESTS[name]}):
            status = subprocess.run([*command, mark, *files], cwd=ROOT, env=environment).returncode or status
    if not status and not options.only:
        told = {"date": datetime.date.today().isoformat(), "python": ".".join(map(str, sys.version_info[:3]))}
        told |= {"torch": importlib.metadata.version("torch"), "passed with": oldest}
        records.replace(RECORD, (json.dumps(told, indent=1) + "\n").encode())
    return status


if __name__ == "__main__":
    sys.exit(main())
