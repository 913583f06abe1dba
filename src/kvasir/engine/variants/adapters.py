"""Adapters while the engine runs: read in the background, kept in host memory, and resident in slots while used
(``turns.py``).

A slot is filled in pieces between steps (``filling.py``), and sequences start once the last piece is on its way. Files
are read by another thread, so that no step waits for a disk. Where nothing runs, a slot is filled at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvasir.client.messages import error_event
from kvasir.config import AdapterConfig
from kvasir.engine.part import LiveRequests, Part
from kvasir.engine.schedule.residents import Residents
from kvasir.engine.variants.filling import Filling, Staging
from kvasir.engine.variants.turns import Turns
from kvasir.errors import ConfigError, Failure, RequestError
from kvasir.logs import log
from kvasir.models.adapters import Adapter, AdapterSlots
from kvasir.types import AdapterInfo, Event, ModelInfo, Request, Sequence


class Adapters(Residents, Part):
    """The adapters of one engine, those of ``lora_modules`` loaded. Raises ConfigError for one that is not served.

    ``in_use(name)``: whether a request that has not ended names it. ``poison``: fill slots with NaN before they are
    filled again.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        config: AdapterConfig,
        info: ModelInfo,
        in_use: Callable[[str], bool] = lambda name: False,
        poison: bool = False,
    ) -> None:
        self.slots = slots
        self.infos = info.adapters  # by name
        self._base, self._most, self._poison, self._in_use = info.name, config.max_cpu_loras, poison, in_use
        self._held: OrderedDict[str, Adapter] = OrderedDict()  # in host memory, by key, least recently used first
        self._turns = Turns(slots.num_slots, self._fill, self._empty, ahead=True)
        self._reader: ThreadPoolExecutor | None = None
        self._stager: ThreadPoolExecutor | None = None
        self._staging = Staging(slots)
        self._loading: dict[str, Future[Adapter]] = {}  # by name: asked for by a caller of ``start_loading``
        self._again: dict[str, Future[Adapter]] = {}  # by key: left host memory, and is read again
        for name, path in config.modules().items():
            self.load(name, path)

    # --------------------------------------------------------------------------------------------------- load, unload

    def load(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter now. Raises ConfigError (it is not served) and RequestError (the name is taken)."""
        self._check_name(name)
        return self._add(self.slots.read(name, Path(path), self._base))

    def start_loading(self, name: str, path: str) -> None:
        """Read an adapter in the background; ``loaded`` tells the result. Raises RequestError for a name in use."""
        self._check_name(name)
        self._loading[name] = self._read(name, path)

    def loaded(self) -> list[tuple[str, AdapterInfo | Exception]]:
        """The results of ``start_loading`` that have come, by name."""
        news: list[tuple[str, AdapterInfo | Exception]] = []
        for name, future in [(n, f) for n, f in self._loading.items() if f.done()]:
            del self._loading[name]
            try:
                news.append((name, self._add(future.result())))
            except Exception as error:
                news.append((name, error))
        return news

    def unload(self, name: str) -> None:
        """Forget an adapter that no sequence uses. Raises RequestError: 404 if there is none, 409 while it is used."""
        info = self.infos.get(name)
        if info is None:
            raise RequestError(f"no adapter '{name}' is loaded", status=404, param="lora_name", code="model_not_found")
        if self._in_use(name):
            raise RequestError(f"adapter '{name}' is in use", status=409, param="lora_name", code="adapter_in_use")
        shared = any(other.key == info.key for other in self.infos.values() if other.name != name)
        del self.infos[name]
        if not shared:
            self._held.pop(info.key, None)
            self._turns.vacate(info.key)

    def _check_name(self, name: str) -> None:
        if name in self.infos or name in self._loading or name == self._base:
            raise RequestError(
                f"'{name}' is in use; unload that adapter first", status=400, param="lora_name", code="adapter_exists"
            )

    def _add(self, adapter: Adapter) -> AdapterInfo:
        info = self.infos[adapter.info.name] = adapter.info
        self._hold(adapter)
        log.info("adapter %s: rank %d, %.1f MiB, from %s", info.name, info.rank, adapter.num_bytes / 2**20, info.path)
        return info

    def _hold(self, adapter: Adapter) -> None:
        """Keep an adapter in host memory; the least recently used ones without a slot leave it."""
        self._held[adapter.info.key] = adapter
        self._held.move_to_end(adapter.info.key)
        for key in [key for key in self._held if key not in self._turns and key != adapter.info.key]:
            if len(self._held) <= self._most:
                return
            del self._held[key]

    def _read(self, name: str, path: str) -> Future[Adapter]:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "adapters")
        return self._reader.submit(self.slots.read, name, Path(path), self._base)

    # -------------------------------------------------------------------------------------------------------- requests

    @property
    def filled(self) -> int:
        """Slots that were filled so far."""
        return self._turns.filled

    @property
    def busy(self) -> bool:
        """Whether an adapter is being read, so that there is something to poll."""
        return bool(self._loading or self._again)

    def before_plan(self, requests: LiveRequests) -> None:
        """Fail the requests that can never start."""
        if self.busy:
            for request, why in self.lost(requests.all()):
                requests.fail(request.id, why)

    def rest(self) -> bool:
        """Finish the slot that is being filled."""
        return self._turns.finish()

    def pending(self) -> list[Future[Adapter]]:
        """Reads in progress."""
        return [*self._loading.values(), *self._again.values()]

    def lost(self, requests: Iterable[Request]) -> list[tuple[Request, Failure]]:
        """Requests that can never start, and why: their adapter left host memory, and its folder has changed since."""
        broken: set[str] = set()
        for key, future in [(k, f) for k, f in self._again.items() if f.done()]:
            del self._again[key]
            try:
                adapter = future.result()
                self._hold(adapter)
                if adapter.info.key != key:
                    broken.add(key)
            except (ConfigError, OSError) as error:
                log.error("an adapter cannot be read again: %s", error)
                broken.add(key)
        mine = [(request, request.variant) for request in requests if request.variant is not None] if broken else []
        return [(request, changed(v.name).failure()) for request, v in mine if v.key in broken]

    # --------------------------------------------------------------------------------------------------------- turns

    def begin(self) -> None:
        self._turns.begin()

    def may_start(self, seq: Sequence) -> bool:
        variant = seq.request.variant
        if variant is None:
            return True
        if variant.key not in self._turns and not self._is_held(variant.key, variant.name):
            return False
        return self._turns.may_start(variant.key)

    def promise(self, seq: Sequence) -> None:
        if seq.request.variant is not None:
            self._turns.promise(seq.request.variant.key)

    def enter(self, seq: Sequence) -> None:
        variant = seq.request.variant
        if variant is not None:
            seq.variant = self._turns.enter(variant.key) + 1
            self._held.move_to_end(variant.key)

    def leave(self, seq: Sequence) -> None:
        if seq.variant:
            self._turns.leave(seq.request.variant.key)
            seq.variant = 0

    def _is_held(self, key: str, name: str) -> bool:
        """Whether an adapter is in host memory; else it is read again."""
        if key in self._held:
            return True
        if key not in self._again and name in self.infos:
            self._again[key] = self._read(name, self.infos[name].path)
        return False

    def _fill(self, slot: int, key: str) -> Filling:
        """Begin to fill a slot with an adapter."""
        if self._stager is None:
            self._stager = ThreadPoolExecutor(1, "adapter slots")
        return Filling(self._staging, self._stager, slot, self._held[key])

    def _empty(self, slot: int) -> None:
        if self._poison:
            self.slots.poison(slot)

    def check(self) -> None:
        self._turns.check()

    def close(self) -> None:
        for executor in (self._reader, self._stager):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)


def refusal(adapters: Adapters | None, request: Request) -> Event | None:
    """The error of a request whose adapter is not here: 404, or 409 where its name has other bytes by now."""
    variant = request.variant
    if variant is None:
        return None
    info = None if adapters is None else adapters.infos.get(variant.name)
    if info is None:
        message = f"no adapter '{variant.name}' is loaded"
        return error_event(request, RequestError(message, status=404, param="model", code="model_not_found"))
    return None if info.key == variant.key else error_event(request, changed(variant.name))


def changed(name: str) -> RequestError:
    """The error of a request that began with other bytes of its adapter."""
    return RequestError(
        f"adapter '{name}' has other bytes now than when this request began; send the request again",
        status=409,
        param="model",
        code="adapter_changed",
    )
