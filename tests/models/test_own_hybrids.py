"""Our own folders of Mamba-3 and M2RNN: every stored number is read once, and the engine's tokens do not depend on
chunks, company, prefix hits or drafts."""

from __future__ import annotations

import pytest

from kvasir.errors import ConfigError
from kvasir.models import cost
from kvasir.models.families import build_spec
from tests.engine.driver import Driver
from tests.engine.test_states import Scripted
from tests.own_hybrids import CONFIGS, OUTER, write
from tests.speculation.helpers import install

PROMPTS = [[1 + (7 * i + k) % 90 for i in range(n)] for k, n in ((0, 40), (0, 21), (3, 9))]


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("siso", "mimo")), "m2rnn"])
def test_tokens_depend_on_nothing_else(name, tmp_path):
    spec, tensors = write(tmp_path, name)
    assert cost.num_params(spec) == sum(t.numel() for t in tensors.values())
    fused = next(t for key, t in tensors.items() if key.endswith("layers.0.recurrent.in_proj.weight"))
    widths = spec.layers[0].mixer.state()[-2].shape[-1]
    assert len(fused) > widths, "the gate is a part of the projection that does not go into the state"

    def tokens(run=(), drafts=None, **options):
        given = dict(page_slots=8, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=96, num_pages=64)
        driver = Driver(str(tmp_path), **{**given, "state_interval": 16, **options})
        if drafts is not None:
            install(driver, drafts)
        requests = [
            driver.request(f"r{i}", p, temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
            for i, p in enumerate(PROMPTS)
        ]
        if run == "alone":
            for request in requests:
                driver.run([request])
        else:
            driver.run(requests, **dict(run))
        driver.close()
        assert not driver.errors
        return [driver.outputs[f"r{i}", 0].tokens for i in range(len(PROMPTS))], driver

    alone, driver = tokens(run="alone", overlap=False)
    assert driver.outputs["r1", 0].num_cached == 16, "the second prompt starts like the first"
    assert tokens(max_num_batched_tokens=7, run={"gap": 2, "preempt_every": 3})[0] == alone
    script = Scripted({(str(i), 0): found for i, found in enumerate(alone)}, right=1)
    drafted, driver = tokens(drafter="ngram", draft_control="fixed", drafts=script)
    stats = driver.engine.stats()
    assert drafted == alone and 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("siso", dict(mamba_rate="exp"), "served are reciprocal"),
        ("siso", dict(mamba_head_dim=7), "no heads of 7"),
        ("mimo", dict(mamba_rope_fraction=1.5), "at most 1"),
        ("m2rnn", dict(rnn_num_key_heads=3), "not a multiple of rnn_num_key_heads"),
        ("m2rnn", dict(layer_types=["recurrent"] * 4), "need one layer that attends"),
        ("m2rnn", dict(layer_types=["linear"] * 4), "served are recurrent and full_attention"),
    ],
)
def test_what_is_not_served_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_spec(OUTER | CONFIGS[name] | changes)
