"""``kvasir bench startup``: measure from exec of the server to the first token of a streamed answer, with a breakdown.

The first start is the coldest, since compile caches may be empty; later ones find files and kernels cached. With a peer
the two take turns, each alone on the machine, on the same weights.

Weights are read while other phases run, so the wait for them (``engine.weights_s``) may be zero. ``engine.fill_s`` is
the time from the first read to the last copy, ``engine.weight_bytes`` the size, and ``engine.fill_gb_s`` the rate.
Files that were just written (``on_disk``), and those of a second start, lie in the page cache: the rate is then not the
disk's.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvasir.bench.provenance import peer_version
from kvasir.bench.result import arm, finish, ratios_of, result, spread
from kvasir.bench.servers import LIVE, SHARED, Server, flags_of, serving
from kvasir.bench.worker import check_peer
from kvasir.bench.workloads import shape_folder
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models import checkpoint


def run(
    config: EngineConfig,
    options: dict[str, Any],
    *,
    shape: str | None,
    repeats: int,
    output: Path | None,
    on_disk: bool = False,
    peer: str | None = None,
    site: str | None = None,
    commit: str | None = None,
) -> None:
    """Start the servers in turns and show the result.

    ``on_disk`` writes the shape's random weights as a checkpoint and loads that, instead of filling memory with random
    numbers.
    """
    if peer:
        check_peer(peer, site)
    if on_disk and not shape:
        raise ConfigError("a checkpoint is written for a shape; pass --shape as well")
    flags = flags_of(options)
    own, theirs = list(flags), flags_of({k: v for k, v in options.items() if k in SHARED})
    with contextlib.ExitStack() as stack:
        model = config.model.model
        if shape:
            model = stack.enter_context(random_checkpoint(shape) if on_disk else shape_folder(shape, tokenizer=True))
            loading = [] if on_disk else ["--load-format", "dummy"]
            own += [*loading, "--served-model-name", shape]
            theirs += [*loading, "--served-model-name", shape]
        elif peer:
            from kvasir.convert.checkpoint import plain_folder

            model = str(plain_folder(checkpoint.resolve(model)))
        starts: dict[str, list[dict[str, float]]] = {}
        for _ in range(repeats):
            for name in ("kvasir", peer) if peer else ("kvasir",):
                starts.setdefault(name, []).append(start_once(model, own if name == "kvasir" else theirs, name, site))
    entries = []
    for name, found in starts.items():
        settings = {"flags": own} if name == "kvasir" else {"flags": theirs, **peer_version(name, site)}
        entries.append(arm(name, settings | {"shape": shape}, _metrics(found)))
    ratios = ratios_of(entries, [("kvasir", peer)] if peer else [])
    finish(result(f"startup-{shape or config.model.model or 'embedded'}", entries, ratios=ratios), output, commit)


def _metrics(starts: list[dict[str, float]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {"cold.first_token_s": starts[0]["first_token_s"], "cold.breakdown": starts[0]}
    if len(starts) > 1:
        best = min(starts[1:], key=lambda s: s["first_token_s"])
        metrics |= {
            "warm.first_token_s": best["first_token_s"],
            "warm.breakdown": best,
            "warm.all_s": spread([s["first_token_s"] for s in starts[1:]]),
        }
    return metrics


@contextlib.contextmanager
def random_checkpoint(shape: str) -> Iterator[str]:
    """Yield a checkpoint of the shape with random weights on disk, as ``transformers`` makes and saves it."""
    try:
        import transformers
    except ImportError as e:
        raise ConfigError("writing a checkpoint needs transformers: pip install transformers") from e
    import torch

    with (
        shape_folder(shape, tokenizer=True) as source,
        tempfile.TemporaryDirectory(prefix=f"kvasir-{shape}-weights-") as folder,
    ):
        config = transformers.AutoConfig.from_pretrained(source)
        quantised = getattr(config, "quantization_config", None)
        if quantised is not None:
            del config.quantization_config
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        if quantised is not None:
            folder = _quantised(Path(folder), quantised)
        for file in Path(source).iterdir():  # the shape's own config, since a newer library may have renamed fields
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        yield folder


def _quantised(folder: Path, config: dict[str, Any]) -> str:
    """Quantise a checkpoint within its own folder, as a shape's ``quantization_config`` says: to 4 bits in groups, or
    to FP8 in blocks or by channel. The unquantised weights are deleted."""
    from kvasir.convert.checkpoint import convert
    from kvasir.convert.converter import load_converter

    if config.get("format") == "pack-quantized":
        spec = "quantise:format=u4"
    else:
        spec = "quantise:scale=block" if config.get("weight_block_size") else "quantise"
    convert(load_converter(spec), spec, folder, folder / "quantised")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return str(folder / "quantised")


def start_once(model: str, flags: list[str], name: str = "kvasir", site: str | None = None) -> dict[str, float]:
    """Seconds from exec until the port answers, the engine is ready, and the first token is read."""
    with serving(name, model, flags, site) as server:
        times = {"live_s": server.wait(LIVE)} if name == "kvasir" else {}
        times["ready_s"] = server.wait()
        times["first_token_s"] = _first_token(server)
        return times | (_breakdown(server) if name == "kvasir" else {})


def _first_token(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {
        "model": model,
        "prompt": list(range(300, 316)),
        "max_tokens": 2,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                return round(time.perf_counter() - server.started, 3)
    raise ConfigError("the server sent no token")


def _breakdown(server: Server) -> dict[str, float]:
    """Seconds of the engine's own phases, and the bytes and rate of ``fill``, which random weights do not have."""
    laps, read = server.gauges("startup_seconds"), server.gauges("weight_bytes")[""]
    found = {f"engine.{stage}_s": round(seconds, 3) for stage, seconds in laps.items()}
    return found | (
        {"engine.weight_bytes": read, "engine.fill_gb_s": round(read / laps["fill"] / 1e9, 3)}
        if laps.get("fill")
        else {}
    )
