"""Versions of a drafter's weights: checked whole, staged, and copied over the served ones between two steps.

The served tensors keep their addresses, so captured work goes on with them. A copy takes its place in the stream of
steps: no step sees half of one. The last accepted version is kept, so that going back is another copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

Weights = Mapping[str, torch.Tensor]


def check(own: Weights, found: Weights) -> None:
    """Raise ValueError where ``found`` cannot take the place of ``own``: names, shapes, or a number that is not
    finite."""
    if own.keys() != found.keys():
        odd = sorted(own.keys() ^ found.keys())
        raise ValueError(
            f"the new weights hold other tensors than the {len(own)} of the drafter: {', '.join(odd[:3])}"
            f"{', ...' if len(odd) > 3 else ''} {'is' if len(odd) == 1 else 'are'} in only one of them"
        )
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"the new {name} has the shape {list(tensor.shape)}, not {list(own[name].shape)}")
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ValueError(f"the new {name} holds NaN, infinity, or what is no number")


@torch.inference_mode()
def overwrite(own: Weights, found: Weights) -> None:
    """Copy ``found`` into ``own``. Raises ValueError before a byte is written."""
    check(own, found)
    copy(own, found)


@torch.inference_mode()
def copy(targets: Weights, sources: Weights) -> None:
    """Copy tensors into others of the same names, in the order of the stream, without waiting."""
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)


def read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the host. Raises ValueError for a file that is cut short or is none."""
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error


class Versions:
    """The served weights of a drafter, the last accepted ones, and a candidate's, all on the same device.

    ``live``: the served tensors, which keep their addresses. ``first``: the version they have now."""

    def __init__(self, live: Weights, first: int = 0) -> None:
        self._live = dict(live)
        with torch.inference_mode():
            self.kept = {name: tensor.clone() for name, tensor in self._live.items()}
            self._candidate = {name: torch.empty_like(tensor) for name, tensor in self._live.items()}
        self.accepted = self.serving = first
        self.candidate: int | None = None  # the number of a staged candidate
        device = next(iter(self._live.values())).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @staticmethod
    def device_bytes(live_bytes: int) -> int:
        """Bytes of the device that the versions take in addition to ``live_bytes``."""
        return 2 * live_bytes

    @torch.inference_mode()
    def stage(self, file: Path, version: int) -> None:
        """Read and check a candidate, and bring it to the device beside the served weights.

        Waits for the copy, so it is called in a thread of its own, while no other candidate is staged or served. Raises
        ValueError; then nothing is staged."""
        found = read(file)
        check(self._live, found)
        if self._stream is None:
            copy(self._candidate, found)
        else:
            pinned = {name: tensor.to(self._live[name].dtype).pin_memory() for name, tensor in found.items()}
            # Wait until earlier copies out of the candidate's place are done.
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                copy(self._candidate, pinned)
            self._stream.synchronize()
        self.candidate = version

    def serve(self, new: bool) -> int:
        """Serve the candidate (``new``) or the last accepted version from the next step on. Returns its number."""
        version = self.candidate if new else self.accepted
        assert version is not None, "no candidate is staged"
        if version != self.serving:
            copy(self._live, self._candidate if new else self.kept)
            self.serving = version
        return version

    def accept(self) -> None:
        """Keep the candidate as the last accepted version, and serve it."""
        self.serve(True)
        self.kept, self._candidate = self._candidate, self.kept
        self.accepted, self.candidate = self.serving, None

    def refuse(self) -> None:
        """Serve the last accepted version and forget the candidate."""
        self.serve(False)
        self.candidate = None
