"""Sets of hooks for a decoder that is loaded: checked against it, and laid out as the sites of its layers take them.

Which sites and layers have hooks is known once the sets are, so captured steps run the same kernels whatever set a slot
holds.

Legend: S slots and one before them, V vocabulary, J hooks of a set.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from pathlib import Path

import torch

from kvasir.errors import ConfigError
from kvasir.hooks.hook import LONGEST, MAX_HOOKS, Hook, HookSet, Made, Steer
from kvasir.kernels.steer import SHIFT, Gates
from kvasir.layers.steering import LayerHooks, Recorder, Stage
from kvasir.models.decoder import Block, Decoder

# Sets that are resident at once, each with one strength.
NUM_SLOTS = 8
# Bytes of a weight file that tell it apart: so many at so many places, with its header and length.
SAMPLE_BYTES, SAMPLES = 4096, 16


def fingerprint(path: Path) -> str:
    """Hex digest of a checkpoint by samples of its weight files, without reading them whole; of its config where it has
    none."""
    found = hashlib.blake2b(digest_size=16)
    files = sorted(path.glob("*.safetensors")) or [path / "config.json"]
    for file in files:
        size = file.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with open(file, "rb") as opened:
            for i in range(SAMPLES):
                opened.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()


def made_for(decoder: Decoder, path: Path) -> Made:
    """The facts by which a set knows its model. Raises ConfigError where no layer has heads that hooks know."""
    heads, dim = next((b.mixer.heads_out for b in decoder.blocks if hasattr(b.mixer, "heads_out")), (0, 0))
    return Made(len(decoder.blocks), heads, dim, decoder.spec.hidden_size, fingerprint(path))


class HookSlots:
    """The slots of every site of a decoder that the ``sets`` act on. Raises ConfigError for a set that was made for
    another model, or that a layer cannot have.

    ``made``: the facts of this model. ``num_positions``: positions that ``record`` has room for."""

    num_slots = NUM_SLOTS

    def __init__(self, decoder: Decoder, sets: list[HookSet], made: Made, num_positions: int) -> None:
        self.sets = {one.key: one for one in sets}
        self._decoder, self._made, self._positions = decoder, made, num_positions
        place, slots = decoder.place, self.num_slots + 1
        self._pinned = place.device.type == "cuda"
        self.gates = decoder.gates = Gates(
            torch.zeros(slots, decoder.spec.vocab_size, dtype=torch.uint8, device=place.device),
            torch.zeros(slots, MAX_HOOKS, 2, dtype=torch.int32, device=place.device),
        )
        # The operations of each set, by layer and site, with the number of the hook: its gate.
        self._found: dict[str, dict[tuple[int, str], list[tuple[int, Steer]]]] = {}
        self._recorded: dict[str, dict[tuple[int, str], int]] = {}  # gates of ``record``
        for one in sets:
            try:
                self._found[one.key], self._recorded[one.key] = self._resolve(one)
            except ConfigError as e:
                raise ConfigError(f"--hook {one.name}={one.path}: {e}") from e
        self._gates = {one.key: self._gates_of(one) for one in sets}
        self.stages: dict[tuple[int, str], list[Stage]] = {}
        self.recorders: dict[tuple[int, str], Recorder] = {}
        for at in sorted({at for found in self._found.values() for at in found}):
            steers = [[steer for _, steer in found.get(at, [])] for found in self._found.values()]
            count = max(len(s.vectors_CHD) for many in steers for s in many)
            shifts = any(s.mode & SHIFT for many in steers for s in many)
            shape = self._shape(*at)
            made_here = [Stage(self.num_slots, *shape, count, shifts, place) for _ in range(max(map(len, steers)))]
            self.stages[at] = self._hooks(at).stages[at[1]] = made_here
        for at in sorted({at for gates in self._recorded.values() for at in gates}):
            recorder = Recorder(self.num_slots, num_positions, *self._shape(*at), place)
            self.recorders[at] = self._hooks(at).recorders[at[1]] = recorder

    def put(self, slot: int, key: str, strength: float) -> None:
        """Fill slot ``slot`` (0-based) at every site. Nothing may be planned with the slot; launched steps are
        ahead of the copies."""
        bits_V, windows_J2 = self._gates[key]
        self.gates.tokens_SV[slot + 1].copy_(bits_V, non_blocking=True)
        self.gates.windows_SJ2[slot + 1].copy_(windows_J2, non_blocking=True)
        for place, stages in self.stages.items():
            found = self._found[key].get(place, [])
            for i, stage in enumerate(stages):
                gate, steer = found[i] if i < len(found) else (0, None)
                stage.put(slot, gate, steer, strength)
        for place, recorder in self.recorders.items():
            recorder.put(slot, self._recorded[key].get(place, 0))

    def _gates_of(self, one: HookSet) -> tuple[torch.Tensor, torch.Tensor]:
        """The gates of a set, as `Gates` has them, in host memory: bits of tokens [V] and windows [J, 2]."""
        bits_V = torch.zeros(self.gates.tokens_SV.shape[1], dtype=torch.uint8)
        windows_J2 = torch.zeros(MAX_HOOKS, 2, dtype=torch.int32)
        for j, hook in enumerate(one.hooks):
            ids = slice(None) if hook.gate.tokens is None else torch.tensor(hook.gate.tokens)
            bits_V[ids] |= 1 << j
            windows_J2[j] = torch.tensor([hook.gate.window[0], min(hook.gate.window[1], LONGEST)])
        return (bits_V.pin_memory(), windows_J2.pin_memory()) if self._pinned else (bits_V, windows_J2)

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN."""
        for stages in self.stages.values():
            for stage in stages:
                stage.poison(slot)

    def recorded(self, layer: int, site: str, positions: list[int]) -> torch.Tensor:
        """States [len(positions), H, D] that the hook ``record`` copied, fp32 on the host."""
        states_PHD = self.recorders[layer, site].states_PHD
        return states_PHD[torch.tensor(positions, device=states_PHD.device)].float().cpu()

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that all slots take."""
        stages = [stage.steers for many in self.stages.values() for stage in many]
        recorders = sum(recorder.states_PHD.nbytes for recorder in self.recorders.values())
        return self.gates.tokens_SV.nbytes + recorders + sum(s.vectors_SCHD.nbytes for s in stages)

    # --------------------------------------------------------------------------------------------------------- checks

    def _resolve(
        self, one: HookSet
    ) -> tuple[dict[tuple[int, str], list[tuple[int, Steer]]], dict[tuple[int, str], int]]:
        """The moves of a set by layer and site, and the gates that record there. Raises ConfigError."""
        self._check_model(one)
        found: dict[tuple[int, str], list[tuple[int, Steer]]] = defaultdict(list)
        recorded: dict[tuple[int, str], int] = defaultdict(int)
        for j, hook in enumerate(one.hooks):
            self._check_hook(hook)
            method = hook.method
            for layer in hook.layers:
                at = layer, hook.site
                if method.records:
                    recorded[at] |= 1 << j
                    continue
                try:
                    steer = method.steer(one.of_layer(hook, layer), *self._shape(*at))
                except ConfigError as e:
                    raise ConfigError(f"{hook.params}.{layer}: {e}") from e
                assert steer is not None, "only what records has no move"
                if self._pinned:
                    steer = dataclasses.replace(steer, vectors_CHD=steer.vectors_CHD.pin_memory())
                found[at].append((j, steer))
        twice = [at for at, steers in found.items() if at[1] != "head_out" and len(steers) > 1]
        if twice:
            raise ConfigError(
                f"layer {twice[0][0]} has {len(found[twice[0]])} hooks at '{twice[0][1]}', and can have one. Combine "
                "them, or use 'head_out', where each starts from what the one before has left."
            )
        return dict(found), dict(recorded)

    def _check_model(self, one: HookSet) -> None:
        for name in Made.__dataclass_fields__ if one.made is not None else ():
            theirs, ours = getattr(one.made, name), getattr(self._made, name)
            if theirs not in ("", ours):
                raise ConfigError(
                    f"it was made for another model: {name} {theirs}, and this model has {ours}. Make it again for "
                    "this model (kvasir lab steer). If the weights differ in nothing that matters, empty the card's "
                    "'hash'."
                )

    def _check_hook(self, hook: Hook) -> None:
        count, vocab = len(self._decoder.blocks), self._decoder.spec.vocab_size
        if max(hook.layers) >= count:
            raise ConfigError(f"layer {max(hook.layers)}: the model has the layers 0 to {count - 1}")
        if len(set(hook.layers)) < len(hook.layers):
            raise ConfigError(f"a layer is named twice: {list(hook.layers)}")
        for token in hook.gate.tokens or ():
            if not 0 <= token < vocab:
                raise ConfigError(f"token_in: {token} is no token of this model, which has {vocab}")
        for layer in hook.layers:
            block = self._decoder.blocks[layer]
            if hook.site == "resid":
                if block.mixer_post_norm is not None or block.ffn_post_norm is not None or block.embedding is not None:
                    raise ConfigError(
                        f"'resid' of layer {layer}: this family has a norm behind each sublayer, which is computed "
                        "with the next layer's. Use 'head_out' or 'attn_out'."
                    )
            elif not hasattr(block.mixer, "heads_out"):
                raise ConfigError(
                    f"layer {layer} has a mixer of kind '{self._decoder.spec.layers[layer].mixer.kind}', without sites "
                    "for hooks. Use 'resid', or other layers."
                )

    def _shape(self, layer: int, site: str) -> tuple[int, int]:
        """Heads and their width at a site."""
        return self._block(layer).mixer.heads_out if site == "head_out" else (1, self._decoder.spec.hidden_size)

    def _block(self, layer: int) -> Block:
        return self._decoder.blocks[layer]

    def _hooks(self, at: tuple[int, str]) -> LayerHooks:
        """The hooks of a layer, which its block and its mixer share."""
        block = self._block(at[0])
        if block.hooks is None:
            block.hooks = LayerHooks()
            if hasattr(block.mixer, "heads_out"):
                block.mixer.hooks = block.hooks
        return block.hooks
