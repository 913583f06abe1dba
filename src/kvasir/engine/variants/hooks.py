"""Hooks while the engine runs: the sets of ``--hook``, resident in slots while requests use them (``turns.py``)."""

from __future__ import annotations

from kvasir.client.messages import error_event
from kvasir.engine.schedule.residents import Residents
from kvasir.engine.variants.turns import Turns
from kvasir.errors import RequestError, nearest
from kvasir.models.hooks import HookSlots
from kvasir.types import Event, Request, Sequence, Variant


class Hooks(Residents):
    """The hooks of one engine. A set with one strength takes a slot. ``poison``: fill slots with NaN before they are
    filled again."""

    def __init__(self, slots: HookSlots, poison: bool = False) -> None:
        self.slots = slots
        self._poison = poison
        self._turns = Turns(slots.num_slots, self._fill, self._empty)
        self._entering: Variant | None = None

    def begin(self) -> None:
        self._turns.begin()

    def may_start(self, seq: Sequence) -> bool:
        hook = seq.request.hook
        return hook is None or self._turns.may_start(hook.resident)

    def promise(self, seq: Sequence) -> None:
        if seq.request.hook is not None:
            self._turns.promise(seq.request.hook.resident)

    def enter(self, seq: Sequence) -> None:
        self._entering = hook = seq.request.hook
        if hook is not None:
            seq.hook = self._turns.enter(hook.resident) + 1

    def leave(self, seq: Sequence) -> None:
        if seq.hook:
            self._turns.leave(seq.request.hook.resident)
            seq.hook = 0

    def check(self) -> None:
        self._turns.check()

    def _fill(self, slot: int, key: str) -> None:
        assert self._entering is not None and self._entering.resident == key
        self.slots.put(slot, self._entering.key, self._entering.strength)

    def _empty(self, slot: int) -> None:
        if self._poison:
            self.slots.poison(slot)


def refusal(hooks: Hooks | None, request: Request) -> Event | None:
    """The error of a request whose set of hooks is not here: 404, or 409 where its name has other bytes by now."""
    hook = request.hook
    if hook is None or (hooks is not None and hook.key in hooks.slots.sets):
        return None
    names = [] if hooks is None else [one.name for one in hooks.slots.sets.values()]
    if hook.name in names:
        message = f"the hooks '{hook.name}' are others now than when this request began; send the request again"
        return error_event(request, RequestError(message, status=409, param="hook", code="hook_changed"))
    return error_event(request, unknown(hook.name, names))


def unknown(name: str, names: list[str]) -> RequestError:
    """The error of a request that names hooks which are not served."""
    served = ", ".join(sorted(names)) or "none"
    message = f"no hooks '{name[:200]}' are served; there are {served}.{nearest(name, names)}"
    return RequestError(message, status=404, param="hook", code="hook_not_found")
