"""Adapters of a server: its engine process is killed, its folders change, and its routes are used as vLLM's are."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import openai
import pytest

from kvasir.client.admission import admit
from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from kvasir.types import ModelInfo, Request, SamplingParams
from tests.adapters import write_adapter
from tests.client.helpers import until
from tests.integration.serving import Served

OUTPUT = 60
ADAPTERS = ["a", None, "b", "a", "b"]  # by request


def requests(info: ModelInfo) -> list[Request]:
    return [
        admit(
            [300 + (i * 31 + j * 7) % 900 for j in range(20 + 9 * i)],
            SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=i % 2, seed=i, n=1 + 2 * (i == 3)),
            info,
            id=f"r{i}",
            arrival=time.monotonic(),
            adapter=adapter,
        )
        for i, adapter in enumerate(ADAPTERS)
    ]


def options(folders, **more) -> EngineConfig:
    settings = {"model": "nano", "device": "cpu", "batch_invariant": True, "num_threads": 1, "max_model_len": 512}
    lora = {"enable_lora": True, "max_loras": 2, "lora_modules": (f"a={folders / 'a'}",)}
    return EngineConfig.of(**{"num_pages": 128, "page_slots": 16, **settings, **lora, **more})


async def read_all(engine: AsyncEngine, kill_at: int = 0, before=lambda: None) -> dict:
    """Run all requests at once, and kill the engine process once the readers have ``kill_at`` tokens. Returns tokens by
    request and branch, or the error that ended a request."""
    found: dict = {}
    seen, killed = 0, False

    async def read(request: Request) -> None:
        nonlocal seen, killed
        try:
            async for event in engine.generate(request):
                found.setdefault((request.id, event.branch), []).extend(event.token_ids)
                seen += len(event.token_ids)
                if kill_at and seen >= kill_at and not killed:
                    killed = True
                    before()
                    os.kill(engine.replica.child.pid, signal.SIGKILL)
        except RequestError as error:
            found[request.id] = error

    await asyncio.gather(*map(read, requests(engine.info)))
    assert killed == bool(kill_at)
    return found


@pytest.fixture
def folders(tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, rank=8, seed=seed, strength=1.0)
    return tmp_path


async def started(folders) -> AsyncEngine:
    engine = AsyncEngine(options(folders))
    await engine.start()
    await engine.load_adapter("b", str(folders / "b"))
    return engine


def test_a_killed_engine_goes_on_with_its_adapters(folders):
    async def body():
        engine = await started(folders)
        try:
            calm = await read_all(engine)
            assert len(calm) == 7 and not any(isinstance(out, RequestError) for out in calm.values())
            assert await read_all(engine, kill_at=100) == calm
            assert engine.num_restarts == 1 and set(engine.info.adapters) == {"a", "b"}
            assert await read_all(engine, kill_at=60) == calm
        finally:
            await engine.stop(0.0)

    asyncio.run(body())


def test_other_bytes_under_the_same_name_end_the_old_requests(folders):
    async def body():
        engine = await started(folders)
        try:
            calm = await read_all(engine)
            found = await read_all(engine, 100, lambda: write_adapter(folders / "a", rank=8, seed=9, strength=1.0))
            for i, adapter in enumerate(ADAPTERS):
                if adapter == "a":
                    assert found[f"r{i}"].status == 409 and found[f"r{i}"].code == "adapter_changed"
                    # What was sent before is of the old bytes, and nothing came after.
                    assert all(out == calm[k][: len(out)] for k, out in found.items() if k[0] == f"r{i}")
                else:
                    assert found[f"r{i}", 0] == calm[f"r{i}", 0]
            again = await read_all(engine)
            assert again["r0", 0] != calm["r0", 0] and again["r2", 0] == calm["r2", 0]
        finally:
            await engine.stop(0.0)

    asyncio.run(body())


def test_unloading_waits_for_requests(folders):
    async def body():
        engine = await started(folders)
        try:
            reading = asyncio.create_task(read_all(engine))
            await until(lambda: engine.replica.adapters._is_named("a"))
            leaving = asyncio.create_task(engine.unload_adapter("a"))
            await until(lambda: "a" not in engine.info.adapters)  # new requests are refused at once
            assert not reading.done()
            with pytest.raises(RequestError, match="in use"):
                await engine.load_adapter("a", str(folders / "b"))
            found = await reading
            assert len(found["r0", 0]) == OUTPUT
            await leaving
            await engine.load_adapter("a", str(folders / "b"))
            with pytest.raises(RequestError, match="no adapter"):
                await engine.unload_adapter("zz")
            with pytest.raises(RequestError, match="adapter_config"):
                await engine.load_adapter("c", str(folders))
        finally:
            await engine.stop(0.0)

    asyncio.run(body())


def test_over_http_as_vllm_has_it(folders):
    flags = ["--enable-lora", "--max-loras", "2", "--allow-runtime-lora"]
    served = Served(folders, *flags, "--lora-modules", f"a={folders / 'a'}", f"z={folders / 'b'}")
    try:
        listed = served.http.get("/v1/models").json()["data"]
        assert [(m["id"], m["parent"]) for m in listed] == [("nano", None), ("a", "nano"), ("z", "nano")]
        assert listed[1]["root"] == str(folders / "a")

        def text(model: str) -> str:
            done = served.client.completions.create(model=model, prompt="Once upon", max_tokens=12, temperature=0)
            assert done.model == model
            return done.choices[0].text

        assert len({text(model) for model in ("nano", "a", "z")}) == 3
        load = {"lora_name": "b", "lora_path": str(folders / "b")}
        assert served.http.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert text("b") == text("z")
        assert served.http.post("/v1/load_lora_adapter", json=load).status_code == 400
        wrong = served.http.post("/v1/load_lora_adapter", json={"lora_name": "w", "lora_path": str(folders)})
        assert wrong.status_code == 400 and "adapter_config.json" in wrong.json()["error"]["message"]
        gone = served.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        assert gone.status_code == 200
        for name in ("b", "nobody"):
            with pytest.raises(openai.NotFoundError):
                text(name)
        assert served.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 404
        chat = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert served.http.post("/v1/chat/completions", json=chat).json()["model"] == "a"
    finally:
        served.kill()
