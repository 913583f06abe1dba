"""C sources as shared libraries: compiled at first use by the machine's compiler for its processor, and kept.

A file in the user's cache folder is named after everything that decides its content (source, flags, compiler,
processor) and ends with a digest, so that a damaged file is built again. Processes that build at the same time write
separate files and rename them into place. OpenMP's symbols stay undefined: they are found in the runtime that torch has
loaded, so both share one team of threads.

``KVASIR_NATIVE=0`` in the environment switches the kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
WIDE = ("-mprefer-vector-width=512",)  # 16 lanes in one register where there are such
DIGEST = 16  # bytes at the end of a file
COMPILE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded ``library``, or None. ``reason`` says where it came from, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


@functools.cache
def native() -> Native:
    """The kernels of this process. Never raises: without them the plain torch path runs."""
    return shared(SOURCE, _declare)


def shared(source: Path, declare: Callable[[ctypes.CDLL], None]) -> Native:
    """The library of a C file. ``declare`` sets the types of its functions, and raises AttributeError or OSError if it
    cannot be used. Never raises."""
    if os.environ.get("KVASIR_NATIVE", "1").lower() in ("0", "false", "off", "no"):
        return Native(None, "switched off by KVASIR_NATIVE")
    return load(cache_folder(), source, declare)


def cache_folder() -> Path:
    """Folder of the compiled libraries, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "native"


def load(folder: Path, source: Path | None = None, declare: Callable[[ctypes.CDLL], None] | None = None) -> Native:
    """Load the library from ``folder``, or compile it into there. Default: the kernels."""
    source, declare = source or SOURCE, declare or _declare
    if sys.platform != "linux" or sys.byteorder != "little":
        return Native(None, "made for Linux and little-endian processors, this is "
                            f"{sys.platform}, {sys.byteorder}-endian")
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc",
                                       "clang") if name and (path := shutil.which(name))), None)
    if compiler is None:
        return Native(None, "no C compiler (install gcc, or set CC)")
    try:
        name = _key(compiler, source)
        file = folder / f"{name}.so"
        if _whole(file):
            try:
                return Native(_open(file, declare), f"cached, by {compiler}")
            except (OSError, AttributeError):
                pass  # built against something that has changed: once more
        with tempfile.TemporaryDirectory(prefix="kvasir-") as scratch:
            built = _compile(compiler, Path(scratch), source)
            built = _keep(built, file) or built
            return Native(_open(built, declare), f"compiled by {compiler}")
    except subprocess.CalledProcessError as e:
        lines = (e.stderr or "").strip().splitlines() or ["no message"]
        return Native(None, f"{compiler} failed: {lines[0]}")
    except (OSError, subprocess.TimeoutExpired, AttributeError) as e:
        return Native(None, str(e))


def _key(compiler: str, source: Path | None = None) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True,
                             timeout=COMPILE_SECONDS).stdout
    source = source or SOURCE
    texts = (file.read_text() for file in (source, *sorted(source.parent.glob("*.h"))))  # with what it may include
    parts = (*texts, *FLAGS, *WIDE, compiler, version, _processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _processor() -> str:
    """The processor's model and instructions, on which -march=native depends."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    said = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join([platform.machine(), *(said[k] for k in ("model name", "flags", "Features",
                                                              "CPU part") if k in said)])


def _compile(compiler: str, folder: Path, source: Path) -> Path:
    """Compile in two calls: given -fopenmp, a linker would add its own OpenMP runtime."""
    unit, library = folder / "unit.o", folder / "unit.so"

    def call(*arguments: str) -> None:
        subprocess.run([compiler, *arguments], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)

    wide = WIDE if platform.machine() == "x86_64" else ()
    call(*FLAGS, *wide, "-fopenmp", "-c", str(source), "-o", str(unit))
    call("-shared", str(unit), "-o", str(library), "-lm")
    return library


def _keep(built: Path, file: Path) -> Path | None:
    """Move a built library into the cache, whole or not at all. None: the cache cannot be written."""
    content = built.read_bytes()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "wb") as out:
            out.write(content + hashlib.blake2b(content, digest_size=DIGEST).digest())
        os.replace(name, file)
    except OSError:
        return None
    return file


def _whole(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST and hashlib.blake2b(content[:-DIGEST],
                                                     digest_size=DIGEST).digest() == content[-DIGEST:]


def _open(file: Path, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(file))
    except OSError:  # torch's OpenMP is loaded, but not for all to see
        for runtime in _runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file))
    declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.kvasir_run.restype = None
    library.kvasir_run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
                                   ctypes.c_int64, ctypes.c_int64)
    library.kvasir_pack.restype = ctypes.c_int64
    library.kvasir_pack.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 7, ctypes.c_void_p, ctypes.c_int64)
    library.kvasir_tiles.restype = ctypes.c_int64
    library.kvasir_tiles.argtypes = ()
    library.kvasir_lanes.restype = ctypes.c_int64
    library.kvasir_lanes.argtypes = ()
    library.kvasir_team.restype = ctypes.c_int64
    library.kvasir_team.argtypes = (ctypes.c_int64,)
    wanted = torch.get_num_threads()
    if (team := library.kvasir_team(wanted)) != wanted:
        raise OSError(f"OpenMP gave {team} of {wanted} threads")


def _runtimes() -> list[str]:
    """Paths of the OpenMP runtimes that this process has mapped."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(p for p in paths if "omp" in Path(p).name and ".so" in p)
