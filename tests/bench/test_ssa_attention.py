"""The emulated ScaleSearchAttention as a backend: exact where nothing is rounded, row by row, and in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir_lab import ssa_attention
from kvasir_lab.ssa_attention import Config, emulate
from tests.engine.driver import Driver

FILE = Path(ssa_attention.__file__)
WHOLE = Config()
BARE = Config(search=False, rotate=False, split=False, sinks=0, recent=0)


def inputs(rows: int, keys: int, heads: int = 2, dim: int = 32):
    draw = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(heads, n, dim, generator=draw) for n in (rows, keys, keys))
    seen = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
    return q, k + 2, v + 1, seen[None]


def exactly(q, k, v, seen):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def test_rounding_is_the_only_difference(monkeypatch):
    given = inputs(40, 203)
    scale, want = 32**-0.5, exactly(*given)
    errors = [float((emulate(*given, scale, config) - want).square().sum()) for config in (WHOLE, BARE)]
    assert 0 < errors[0] < errors[1] / 4
    assert float((emulate(*given, scale, Config(recent=203)) - want).abs().max()) < 1e-5
    monkeypatch.setattr(ssa_attention, "rounded", lambda x, *rest: x)
    for config in (WHOLE, BARE):
        assert float((emulate(*given, scale, config) - want).abs().max()) < 1e-5


@pytest.mark.parametrize("config", [pytest.param(WHOLE, marks=pytest.mark.slow), BARE])
def test_rows_of_a_span_are_those_of_one_row_each(config):
    """Without the mean, which is over what the span knows."""
    config = Config(config.search, config.rotate, False, config.sinks, 16 if config.recent else 0)
    q, k, v, seen = inputs(5, 70)
    together = emulate(q, k, v, seen, 0.2, config)
    for i in range(5):
        end = 66 + i
        alone = emulate(q[:, i : i + 1], k[:, :end], v[:, :end], torch.ones(1, 1, end, dtype=torch.bool), 0.2, config)
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_in_the_engine():
    """The log-probabilities are those of the reference while all keys keep full precision. In NVFP4, the control, they
    are others."""
    found = {}
    rest = "search=true,rotate=true,split=true,sinks=0,recent="
    for name in ("torch", f"{FILE}:{rest}512", f"{FILE}:{rest}0"):
        d = Driver(batch_invariant=False, attention_backend=name, max_num_batched_tokens=64)
        names = [f"r{i}" for i in range(3)]
        d.run([
            d.request(n, [3 + (7 * i + 3 * j) % 90 for j in range(40 + 30 * i)], temperature=0.0, max_tokens=6,
                      ignore_eos=True, logprobs=0, prompt_logprobs=0)
            for i, n in enumerate(names)
        ])  # fmt: skip
        outs = [d.outputs[n, 0] for n in names]
        found[name] = torch.tensor([p.logprob for o in outs for p in [*o.prompt_logprobs[1:], *o.logprobs]])
        d.close()
    plain, exact, low = found.values()
    assert float((exact - plain).abs().max()) < 1e-3 < 0.05 < float((low - plain).abs().max())


def test_models_that_it_cannot_emulate():
    with pytest.raises(ConfigError, match="is not for exact mode"):
        Driver(attention_backend=str(FILE))
