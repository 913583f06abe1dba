"""Quantised weights in the engine: tokens that do not depend on the batch, keys of prefixes, and sizes."""

from __future__ import annotations

import pytest

from kvasir.config import EngineConfig
from kvasir.engine.start import build
from kvasir.models.native_decoder import why_not
from tests.engine.driver import Driver

PROMPT = [300 + 7 * (i % 9) for i in range(50)]


def run(**options) -> tuple[Driver, list[list[int]]]:
    d = Driver(**options)
    for i in range(3):
        seed = dict(temperature=1.0, seed=i, max_tokens=10, ignore_eos=True)
        d.run([d.request(f"{i}", PROMPT[i:], **seed)] if i else [d.request(f"{i}", PROMPT, **seed)])
    return d, [d.outputs[f"{i}", 0].tokens for i in range(3)]


def test_tokens_do_not_depend_on_the_way_they_are_computed():
    """Exact mode: chunks, shared prefixes and verified drafts give the tokens of the same weights; others do not."""
    d, want = run(weights="f8")
    model = d.engine.runner.model
    assert {w.format.name for w in model.weights() if w is not model.head} == {"f8"}
    reason = why_not(model, d.engine.runner.parts.caches, d.engine.runner.backend)
    d.close()
    for options in (
        dict(max_num_batched_tokens=17, enable_prefix_caching=False),
        dict(drafter="ngram", draft_control="fixed"),
    ):
        d, tokens = run(weights="f8", **options)
        d.close()
        assert tokens == want, options
    d, plain = run()
    d.close()
    assert plain != want and reason is not None


def test_the_native_kernels_leave_other_formats_alone():
    d = Driver(weights="f8", batch_invariant=False)
    parts = d.engine.runner.parts
    assert "weights' format: 'f8'" in why_not(parts.model, parts.caches, d.engine.runner.backend)
    d.close()


def test_the_prefix_key_knows_weights_and_activations(monkeypatch):
    found, keep = [], build._prefix_root
    monkeypatch.setattr(build, "_prefix_root", lambda *args: found.append(keep(*args)) or found[-1])
    for options in ({}, {}, {"weights": "f8"}, {"weights": "f8:scale=block"}, {"activation_dtype": "bf16"}):
        Driver(**options).close()
    assert found[0] == found[1] == found[4] and len({*found}) == 3
    model = Driver(weights="f8")
    config = EngineConfig.of(model="nano", weights="f8")
    place = model.engine.runner.model.place
    monkeypatch.setattr(model.engine.runner.model, "place", type(place)(place.device, place.dtype, activations="fp8"))
    other = keep(config, {}, model.engine.runner.model, [])
    monkeypatch.setattr(model.engine.runner.model, "place", place)
    assert other != keep(config, {}, model.engine.runner.model, [])
    model.close()


@pytest.mark.parametrize("weights", ["auto", "f8"])
def test_the_step_times_count_the_bytes_that_are_read(weights):
    d = Driver(weights=weights)
    model = d.engine.runner.model
    sizes = [w.num_bytes for w in model.weights()]
    roof = build._roofline(model, d.engine.runner.device, model.place.dtype, 1.0)
    d.close()
    assert roof.weight_bytes == pytest.approx(sum(sizes), rel=0.01)
