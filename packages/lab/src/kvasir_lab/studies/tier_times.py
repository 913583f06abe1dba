"""Times of the tiers of the KV cache: copies against the link, a step beside copies, and a restart with a warm disk.

``rates``: GB/s of pages to host memory and back, in order and scattered, and of one contiguous copy of the same bytes,
which is the link's own rate. ``step``: the median time of a decode step alone and while pages are copied both ways.
``restart``: seconds to the first token of a long prompt that is computed, that comes from host memory, and that comes
from the disk after a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal

import torch

from kvasir import technique
from kvasir.bench.workloads import shape_folder
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError
from kvasir.kv.tier import TIERS, Move, Place, Tier
from kvasir.types import SamplingParams
from kvasir_lab.study import Arms, Report, study


class Named:
    """A page's name where nobody asks for it."""

    key, tokens, variant, parent = b"0" * 16, [0], "", None


def settings(given: argparse.Namespace, **more: Any) -> EngineConfig:
    found: dict[str, Any] = dict(device=given.device, max_model_len=given.prompt + 64, skip_tokenizer_init=True)
    if given.shape:
        found |= {"load_format": "dummy"}
    return EngineConfig.of(**found | more)


def opened(engine: Engine, pages: int) -> tuple[Tier, Place]:
    """A host tier of its own with ``pages`` slots."""
    pool = engine.runner.pool
    place = Place(pool, engine.runner.device, b"")
    share = pool.num_pages[0] * pool.page_bytes(0) / sum(n * b for n, b in zip(pool.num_pages, place.page_bytes))
    host = technique.load(TIERS, f"host:bytes={int((pages + 1) * pool.page_bytes(0) / share)}", Tier)
    host.open(place)
    while not host.ready:
        time.sleep(0.01)
    return host, place


def timed(work: Callable[[], Any], times: int) -> float:
    """Median seconds of ``work``, which returns when it is done, after one call that does not count."""
    work()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return median(found)


def rates(given: argparse.Namespace, folder: str) -> dict[str, float]:
    engine = Engine(settings(given, model=folder, kv_host_bytes=0, num_pages=given.pages + 1, fit=True))
    host, place = opened(engine, given.pages)
    down, up = host.links(place)
    rows, own = place.pool.pages[0], host.rows(0)
    size, cuda = given.pages * place.page_bytes[0], rows.is_cuda
    shuffled = random.Random(0).sample(range(given.pages), given.pages)
    orders = {
        "ordered": [Move(1 + i, i, Named) for i in range(given.pages)],  # type: ignore[arg-type]
        "scattered": [Move(1 + i, shuffled[i], Named) for i in range(given.pages)],  # type: ignore[arg-type]
    }

    def plain(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()

    found: dict[str, float] = {"page_bytes": place.page_bytes[0], "pages": given.pages}
    whole, device = own[: given.pages], rows[1 : given.pages + 1]
    seconds = {"link_down": timed(lambda: plain(whole, device), given.times)}
    seconds["link_up"] = timed(lambda: plain(device, whole), given.times)
    for name, moves in orders.items():
        for way, link, job in (("down", down, host.write), ("up", up, host.read)):
            work = partial(job, 0, rows, moves)
            seconds[f"{name}_{way}"] = timed(lambda link=link, work=work: link.submit(work).result(), given.times)
    found |= {f"{name}_gb_s": round(size / spent / 1e9, 3) for name, spent in seconds.items()}
    for name in orders:
        for way in ("down", "up"):
            found[f"{name}_{way}_share"] = round(seconds[f"link_{way}"] / seconds[f"{name}_{way}"], 4)
    close(engine, host, down, up)
    return found


def step(given: argparse.Namespace, folder: str) -> dict[str, float]:
    """Steps of ``batch`` decodes. Copies up go to page 0, which nobody reads."""
    engine = Engine(settings(given, model=folder, kv_host_bytes=0, max_num_seqs=max(8, given.batch)))
    host, place = opened(engine, given.pages)
    down, up = host.links(place)
    rows = place.pool.pages[0]
    some = range(min(given.pages, len(rows) - 1))
    leaving = [Move(1 + i, i, Named) for i in some]  # type: ignore[arg-type]
    coming = [Move(0, i, Named) for i in some]  # type: ignore[arg-type]
    for i in range(given.batch):
        prompt = [3 + (7 * i + 3 * j) % 900 for j in range(32)]
        params = SamplingParams(temperature=0.0, max_tokens=given.prompt, ignore_eos=True, detokenize=False)
        engine.submit(admit(prompt, params, engine.info, id=f"r{i}", arrival=0.0, encode=None))
    for _ in range(given.warm):
        engine.step()
    while engine.idle():
        pass
    times: dict[bool, list[float]] = {False: [], True: []}
    flying: list[Any] = []
    for i in range(2 * given.steps):
        busy = i // 8 % 2 == 1  # in turns, so that both meet contexts of the same length
        if busy and (not flying or all(future.done() for future in flying)):
            flying = [
                down.submit(partial(host.write, 0, rows, leaving)),
                up.submit(partial(host.read, 0, rows, coming)),
            ]
        if not busy:
            for future in flying:
                future.result()
        started = time.perf_counter()
        engine.step()
        times[busy].append(time.perf_counter() - started)
    for future in flying:
        future.result()
    alone, beside = median(times[False]), median(times[True])
    close(engine, host, down, up)
    return {"alone_ms": round(1e3 * alone, 4), "beside_ms": round(1e3 * beside, 4), "ratio": round(beside / alone, 4)}


def restart(given: argparse.Namespace, folder: str) -> dict[str, float]:
    prompt = [3 + (7 * j + j // 900) % 900 for j in range(given.prompt)]

    def first_token(engine: Engine, name: str, first: int = 0) -> tuple[float, int]:
        asked = [first or prompt[0], *prompt[1:]]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        started, cached = time.perf_counter(), 0
        engine.submit(admit(asked, params, engine.info, id=name, arrival=time.monotonic(), encode=None))
        while engine.has_work():
            cached += sum(event.num_cached for event in engine.step())
        return time.perf_counter() - started, cached

    found: dict[str, float] = {"prompt_tokens": given.prompt}
    with tempfile.TemporaryDirectory(dir=given.folder or None) as disk:
        pages = -(-given.prompt // 16) + 64  # a second prompt of that length pushes the first one out
        more = dict(model=folder, num_pages=pages, kv_host_bytes=given.host_bytes)
        more |= {"kv_disk": f"{disk},bytes={given.host_bytes}", "page_slots": 16}
        for life in ("before", "after"):
            engine = Engine(settings(given, **more))
            while not all(tier.ready for tier in engine.tiers.tiers):
                time.sleep(0.01)
            first_token(engine, "warm", 5)
            seconds, cached = first_token(engine, "a")
            found["disk_s" if life == "after" else "computed_s"] = round(seconds, 4)
            found["disk_cached" if life == "after" else "computed_cached"] = cached
            first_token(engine, "other", 7)
            seconds, cached = first_token(engine, "b")
            if life == "before":
                found |= {"host_s": round(seconds, 4), "host_cached": cached}
            while engine.idle():
                pass
            engine.close()
            del engine
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


def close(engine: Engine, host: Tier, *links: Any) -> None:
    for link in links:
        link.close()
    host.close()
    engine.close()


PARTS = {"rates": rates, "step": step, "restart": restart}


@study("tier-times")
def main(
    report: Report,
    *,
    part: tuple[str, ...] = tuple(PARTS),
    shape: Annotated[str, "a known shape with random weights instead of a model"] = "",
    model: Annotated[str, "folder or name; default: the model in the package"] = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    pages: Annotated[int, "pages of a copy"] = 512,
    times: Annotated[int, "copies that are timed"] = 10,
    batch: Annotated[int, "sequences that decode"] = 16,
    warm: Annotated[int, "steps before the first that is timed"] = 64,
    steps: Annotated[int, "steps of each kind"] = 400,
    prompt: Annotated[int, "tokens of the long prompt"] = 32768,
    host_bytes: Annotated[int, "bytes of host memory, and of files"] = 32 << 30,
    folder: Annotated[str, "place of the files; default: the system's folder for temporary files"] = "",
) -> Arms:
    report.case = f"tier-times-{shape or model or 'embedded'}"
    if unknown := [name for name in part if name not in PARTS]:
        raise ConfigError(f"no part named '{unknown[0]}'; there are {', '.join(PARTS)}")
    with shape_folder(shape) if shape else contextlib.nullcontext(model) as path:
        for name in part:
            yield name, {"shape": shape or model or "embedded"}, PARTS[name](report.options, path)
