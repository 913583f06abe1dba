"""Planted mistakes that the comparison with transformers must see. A comparison that they pass compares nothing."""

import pytest
import torch

from kvasir.layers.mixers.gqa import Mixer
from kvasir.layers.spec import RopeSpec
from kvasir.models.families import gpt_oss, phi3
from kvasir.models.stored import View
from tests import checkpoints
from tests.models.test_parity import assert_parity


def transposed(monkeypatch):
    """Experts as wide as the model, read as they lie."""
    real = gpt_oss.stored

    def wrong(slot, spec):
        found = real(slot, spec)
        return View(found.name, found.index) if "down.weight" in slot else found

    monkeypatch.setattr(gpt_oss, "stored", wrong)


def exchanged(family):
    def plant(monkeypatch):
        real = family.stored
        swap = {"gate": "up", "up": "gate"}

        def wrong(slot, spec):
            parts = [swap.get(part, part) if ".ffn." in slot else part for part in slot.split(".")]
            return real(".".join(parts), spec)

        monkeypatch.setattr(family, "stored", wrong)

    return plant


def no_sinks(monkeypatch):
    real = Mixer.forward

    def wrong(self, *arguments, **options):
        if self.sinks_H is not None:
            self.sinks_H.fill_(-1e9)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Mixer, "forward", wrong)


def whole_heads(monkeypatch):
    """Frequencies of a partly rotated head taken from the whole head."""
    real = RopeSpec.__init__

    def wrong(self, theta, head_dim, *rest, **options):
        real(self, theta**0.75, head_dim, *rest, **options)

    monkeypatch.setattr(RopeSpec, "__init__", wrong)


MISTAKES = {
    "experts are read transposed": ("gpt_oss_plain", transposed),
    "gate and up of experts are exchanged": ("gpt_oss", exchanged(gpt_oss)),
    "gate and up of a fused tensor are exchanged": ("phi3", exchanged(phi3)),
    "sinks are left out": ("gpt_oss", no_sinks),
    "a partly rotated head has the frequencies of a whole one": ("phi3_partial", whole_heads),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees(mistake, tmp_path, monkeypatch):
    variant, plant = MISTAKES[mistake]
    folder = checkpoints.write(tmp_path, variant)
    plant(monkeypatch)
    with torch.inference_mode(), pytest.raises(AssertionError, match="not close"):
        assert_parity(folder)
