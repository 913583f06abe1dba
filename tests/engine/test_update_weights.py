"""New weights in place, between two requests: outputs follow them, and nothing cached of the old ones is used."""

from __future__ import annotations

import pytest
import torch

from kvasir.errors import ConfigError
from tests.engine.driver import Driver

PROMPT = [300 + 7 * i for i in range(50)]


def run(d: Driver, name: str) -> tuple[list[int], int]:
    d.run([d.request(name, PROMPT, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)])
    return d.outputs[name, 0].tokens, d.outputs[name, 0].num_cached


@pytest.mark.parametrize("native", [True, False])
def test_outputs_follow_and_prefixes_are_forgotten(native, monkeypatch):
    if not native:
        monkeypatch.setattr("kvasir.engine.start.build.why_not", lambda *_: "not wanted")
    d = Driver()
    first, _ = run(d, "first")
    again, cached = run(d, "again")
    assert again == first and cached > 30
    with torch.inference_mode():
        for slot in d.engine.runner.model.slots().values():
            slot.target.mul_(1.5)
    d.engine.weights_changed()
    other, cached = run(d, "other")
    assert other != first and cached == 0
    d.engine.update_weights("nano")
    back, cached = run(d, "back")
    assert back == first and cached == 0, "weights are those of the checkpoint, keys and values are computed again"
    assert run(d, "cached") == (first, 48)
    d.close()


def test_another_model_is_refused():
    d = Driver()
    with pytest.raises(ConfigError):
        d.engine.update_weights("base")
    d.close()
