"""Adapters as the client knows them: what is served under which name, so that the next process serves it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.client import messages
from kvasir.client.journal import Journal
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.types import AdapterInfo, ModelInfo

# Pause between two looks at whether requests of an adapter that is being unloaded have ended.
POLL_SECONDS = 0.02
# Time after which a refused caller may try again (Retry-After).
RETRY_SECONDS = 5.0

Send = Callable[[object], None]


class Registry:
    """Names and folders of adapters. ``info.adapters`` of the living process has those that new requests may name;
    requests in ``journal`` may name others, which are being unloaded."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._alive = False
        self._served: dict[str, AdapterInfo] = {}  # by name, those that are being unloaded included
        self._waiting: dict[str, asyncio.Future[AdapterInfo | None]] = {}
        self._leaving: set[str] = set()
        self._restarted = False
        self._info = ModelInfo(name="", max_model_len=0, vocab_size=0, tokenizer_size=0)

    def welcome(self, info: ModelInfo) -> None:
        """Take the facts of a process that is ready: the first one has loaded what the settings name."""
        self._info, self._alive = info, True
        self._served |= info.adapters
        info.adapters |= {name: own for name, own in self._served.items() if name not in self._leaving}

    def again(self) -> list[messages.LoadAdapter]:
        """The messages by which a process that knows no adapter loads them, before it gets requests."""
        if not self._restarted:
            return []
        return [messages.LoadAdapter(info.name, info.path, again=True) for info in self._served.values()]

    def process_ended(self) -> None:
        """Fail what waits for an answer of the process. From now on, every process is told what to load."""
        self._restarted, self._alive = True, False
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(
                    RequestError("the engine restarted", status=503, code="engine_down", retry_after=RETRY_SECONDS)
                )

    def news(self, news: messages.AdapterNews) -> None:
        """Take the end of a load or an unload."""
        waiter = self._waiting.get(news.name)
        error = None
        if news.status:
            error = RequestError(news.message, status=news.status, param="lora_name", code=news.code)
        if waiter is not None and not waiter.done():
            waiter.set_result(news.info) if error is None else waiter.set_exception(error)
        elif error is not None:  # a restarted process could not load it: its requests fail, and so will new ones
            log.error("adapter %s is no longer served: %s", news.name, news.message)
            self._served.pop(news.name, None)
            self._info.adapters.pop(news.name, None)
        if news.info is not None:
            self._served[news.name] = news.info
            if news.name not in self._leaving:
                self._info.adapters[news.name] = news.info

    async def load(self, name: str, path: str, send: Send) -> AdapterInfo:
        """Load an adapter and wait for it. Raises RequestError."""
        if name in self._served or name in self._waiting or name == self._info.name:
            raise RequestError(
                f"'{name}' is in use; unload that adapter first", param="lora_name", code="adapter_exists"
            )
        info = await self._ask(name, messages.LoadAdapter(name, path), send)
        assert info is not None, "a loaded adapter is described"
        return info

    async def unload(self, name: str, send: Send) -> None:
        """Forget an adapter once no request names it. Raises RequestError."""
        if name not in self._served or name in self._leaving:
            raise RequestError(f"no adapter '{name}' is loaded", status=404, param="lora_name", code="model_not_found")
        self._leaving.add(name)
        self._info.adapters.pop(name, None)
        try:
            while not self._alive or self._is_named(name):
                await asyncio.sleep(POLL_SECONDS)
            await self._ask(name, messages.UnloadAdapter(name), send)
            self._served.pop(name, None)
        finally:
            self._leaving.discard(name)
            if name in self._served:  # the caller left, or the process ended: it is served on
                self._info.adapters[name] = self._served[name]

    def _is_named(self, name: str) -> bool:
        variants = (entry.request.variant for entry in self._journal)
        return any(variant is not None and variant.name == name for variant in variants)

    async def _ask(
        self, name: str, message: messages.LoadAdapter | messages.UnloadAdapter, send: Send
    ) -> AdapterInfo | None:
        waiter = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            send(message)
            return await waiter
        finally:
            del self._waiting[name]
