"""The variants of one engine: slots of the device for adapters and for sets of hooks, and who decides about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.config import EngineConfig
from kvasir.engine.schedule.residents import AllResidents, Residents
from kvasir.engine.variants import adapters, hooks
from kvasir.engine.variants.adapters import Adapters
from kvasir.engine.variants.hooks import Hooks
from kvasir.errors import ConfigError
from kvasir.hooks.hook import read_set
from kvasir.logs import log
from kvasir.models.adapters import AdapterSlots, slots_for
from kvasir.models.decoder import Decoder
from kvasir.models.hooks import HookSlots, made_for
from kvasir.types import Event, HookInfo, ModelInfo, Request


@dataclass(frozen=True, slots=True)
class VariantSlots:
    """The slots for adapters and for hooks (None: there are none). ``infos``: the sets of hooks, by name."""

    adapters: AdapterSlots | None
    hooks: HookSlots | None
    infos: dict[str, HookInfo]

    @property
    def count(self) -> int:
        """Number of variants that can be resident."""
        adapters = 0 if self.adapters is None else self.adapters.num_variants
        return adapters + (0 if self.hooks is None else self.hooks.num_slots)

    def residents(
        self, config: EngineConfig, info: ModelInfo, in_use: Callable[[str], bool]
    ) -> tuple[Adapters | None, Hooks | None]:
        """The residents that decide about the slots. ``in_use(name)``: whether a request that has not ended names the
        adapter."""
        poison, served = config.runner.poison, config.adapters.enable_lora and self.adapters is not None
        info.hooks = self.infos
        return (
            Adapters(self.adapters, config.adapters, info, in_use, poison) if served else None,
            None if self.hooks is None else Hooks(self.hooks, poison),
        )


def make_slots(model: Decoder, config: EngineConfig, path: Path, guest_rank: int = 0) -> VariantSlots:
    """Make the slots that the settings ask for. ``path``: the checkpoint; ``guest_rank``: the rank of the adapter that
    computes a drafter's guests (0: none). Raises ConfigError."""
    slots = slots_for(model, config.adapters, guest_rank)
    folders = config.hooks.folders()
    if folders and model.spec.labels is not None:
        raise ConfigError("--hook: this model embeds or scores, and its requests name no hooks. Leave out --hook.")
    sets = [read_set(name, Path(folder)) for name, folder in folders.items()]
    if not sets:
        return VariantSlots(slots, None, {})
    made = HookSlots(model, sets, made_for(model, path), config.model.max_model_len or model.spec.max_position)
    for one in sets:
        log.info("hooks %s: %s, from %s", one.name, "; ".join(one.info.parts), one.path)
    if model.place.device.type == "cpu":
        log.info("steps with hooks are not native on a CPU: no native kernel has their sites; they run from tapes")
    return VariantSlots(slots, made, {one.name: one.info for one in sets})


def all_of(adapters: Adapters | None, hooks: Hooks | None) -> Residents | None:
    """Both together, for the scheduler; None: there are neither."""
    kinds: list[Residents] = [kind for kind in (adapters, hooks) if kind is not None]
    return kinds[0] if len(kinds) == 1 else AllResidents(kinds) if kinds else None


def refusal(own: Adapters | None, sets: Hooks | None, request: Request) -> Event | None:
    """The error of a request whose adapter or hooks are not here."""
    return adapters.refusal(own, request) or hooks.refusal(sets, request)
