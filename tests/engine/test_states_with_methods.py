"""Codecs and hooks with a model that keeps states: they act on the layers that attend and on the residual stream, and
tokens do not depend on chunks, company or preemption. CPU exact mode."""

from __future__ import annotations

import pytest

from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook
from tests.engine.test_state_drafters import alone, engine, folder, requests, tokens
from tests.hooks import write_hooks
from tests.speculation.helpers import outputs

__all__ = ["alone", "folder"]  # fixtures
SHAPE = 4, 2, 16, 32  # layers, heads, their width, width of the state
ALONE = dict(max_num_batched_tokens=256, enable_prefix_caching=False, overlap=False)
CROWD = dict(max_num_batched_tokens=20)


def answers(folder: str, options: dict, **params) -> dict:
    driver = engine(folder, **options)
    given = requests(driver, **params)
    for some in [given] if options["max_num_batched_tokens"] == 20 else [[r] for r in given]:
        driver.run(some, **(dict(gap=1, preempt_every=3) if len(some) > 1 else {}))
    driver.close()
    return tokens(driver) if "logprobs" not in params else outputs(driver)


@pytest.mark.parametrize("codec", ["int4_bdr", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_codec_acts_on_layers_that_attend(codec, folder):
    """Tokens and log-probabilities to the bit; those without the codec differ."""
    found = answers(folder, ALONE | {"kv_codec": codec}, logprobs=0)
    assert answers(folder, CROWD | {"kv_codec": codec}, logprobs=0) == found
    assert answers(folder, ALONE, logprobs=0) != found


@pytest.mark.parametrize("site, layer, op", [("head_out", 2, "rotate:c=-1"), ("resid", 0, "add:scale=0.5")])
def test_hooks_steer_a_hybrid(site, layer, op, folder, alone, tmp_path):
    path = write_hooks(tmp_path, [Hook(site, (layer,), op, Gate())], shape=SHAPE)
    given = {"hook": (f"turn={path}",)}
    found = answers(folder, ALONE | given, hook="turn")
    assert answers(folder, CROWD | given, hook="turn") == found != alone
    assert answers(folder, CROWD | given) == alone, "requests without it are not steered"


def test_sites_that_a_recurrent_layer_lacks_are_refused(folder, tmp_path):
    path = write_hooks(tmp_path, [Hook("head_out", (0, 2), "rotate:c=-1", Gate())], shape=SHAPE)
    with pytest.raises(ConfigError, match="without sites for hooks"):
        engine(folder, hook=(f"turn={path}",))
