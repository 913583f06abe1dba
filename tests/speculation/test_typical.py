"""``medusa:typical`` in the engine: greedy tokens stay, others are not those of the plain engine."""

from __future__ import annotations

import pytest

from kvasir.errors import ConfigError
from tests.speculation.trained import driver, plain, random_head, requests, tokens


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> str:
    return f"medusa:model={random_head('medusa', tmp_path_factory.mktemp('heads'))},typical=0.0001"


def run(spec: str, temperature: float):
    d = driver(spec, batch_invariant=False)
    d.run(requests(d, temperature))
    found, stats = tokens(d), d.engine.stats()
    d.close()
    return found, stats.accepted_tokens


def test_greedy_tokens_stay_and_others_do_not(spec):
    assert run(spec, 0.0)[0] == plain(0.0)
    lossy, accepted = run(spec, 1.0)
    exact, accepted_exactly = run(spec.replace("typical=0.0001", "typical=0"), 1.0)
    assert exact == plain(1.0) and lossy != exact and accepted > accepted_exactly


def test_it_is_refused_where_tokens_are_promised(spec):
    with pytest.raises(ConfigError, match="typical=0.0001 changes tokens.*Leave it out"):
        driver(spec, batch_invariant=True)
    with pytest.raises(ConfigError, match="must run alone"):
        driver(f"{spec}+suffix", batch_invariant=False)
    with pytest.raises(ConfigError, match="published: 0.09"):
        driver("medusa:typical=1", batch_invariant=False)
