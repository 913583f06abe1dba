"""Provenance of results: the commit, the versions and the hardware, and which of these facts a result lacks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from kvasir.bench.peers import vllm_kernels

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")
# Peers by the start of an arm's name: the package whose version a result must name.
PEERS = {"vllm": "vllm", "transformers": "transformers", "llama_cpp": "llama-cpp-python"}


def machine() -> str:
    """The device that did the work, in words: the GPU if torch sees one, else the CPU."""
    found = hardware()
    if "gpu" in found:
        import torch

        return f"{found['gpu']} x{torch.cuda.device_count()}, {os.cpu_count()} cores"
    return f"{found['cpu']}, {os.cpu_count()} cores"


def hardware() -> dict[str, str]:
    """Model of the CPU and, where torch sees a GPU, its name, its driver and the version of CUDA that torch uses."""
    import torch

    found = {"cpu": _cpu()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "driver": _driver(), "cuda": torch.version.cuda or ""}
    return {name: value for name, value in found.items() if value}


def commit() -> str:
    """The commit that KVASIR_COMMIT names, for copies without the repository or with an older one; else that of the
    working tree, with ``+`` when it has changes; empty outside a repository."""
    if named := os.environ.get("KVASIR_COMMIT"):
        return named

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def versions() -> dict[str, str]:
    """Versions of kvasir, Python and the packages that results depend on, as far as they are installed."""
    from kvasir import __version__

    return {"kvasir": __version__, "python": platform.python_version()} | _installed(PACKAGES)


def peer_version(name: str, site: str | None = None) -> dict[str, str]:
    """Version of a peer's package in the folder ``site``, or here, as {"version": ...}; empty without metadata. For
    vLLM also ``kernels`` if some of them cannot be compiled there."""
    package = PEERS[name]
    if site is None:
        version = _installed((package,)).get(package)
    else:
        version = next((d.version for d in importlib.metadata.distributions(name=package, path=[site])), None)
    found = {"version": version} if version else {}
    return found | ({"kernels": vllm_kernels.SAID} if name == "vllm" and vllm_kernels.lacks_headers(site) else {})


def missing(found: dict[str, Any]) -> list[str]:
    """Names of the facts that a result lacks, in alphabetical order. Simulations need no hardware."""
    lacks = {name for name in ("command", "commit") if not found.get(name)}
    if not {"python", "torch"} <= set(found["versions"]):
        lacks.add("versions")
    machine, facts = found["machine"], found.get("hardware", {})
    if machine.startswith("NVIDIA"):
        lacks |= {name for name in ("cpu", "driver", "cuda") if not facts.get(name)}
    for entry in found["arms"]:
        peer = next((name for name in PEERS if entry["name"].startswith(name)), None)
        named = entry["config"].get("version") or found["versions"].get(PEERS.get(peer, ""))
        if peer and not named:
            lacks.add("peer version")
    return sorted(lacks)


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    """The model of the CPU as Linux names it, else as Python does."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _driver() -> str:
    """The version of the NVIDIA driver; empty where ``nvidia-smi`` does not tell it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""
