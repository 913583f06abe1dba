"""Calibration over the converted layers, in a model of 12: what the pass optimises, and that its control fails.

The pass makes each layer's latent the best one for what the layer reads in the converted model. So sums over the
source's layers lose more there, in every layer but the first. The loss of the whole model need not be larger: the page
on conversions says what was measured.
"""

from __future__ import annotations

import pytest

from kvasir.convert.calibrate import Run
from kvasir.convert.converter import Source
from kvasir.models import checkpoint
from kvasir_lab.studies.mla_study import Unconverted, layer_errors, one_shot
from tests.checkpoints import write
from tests.convert.test_mla import texts


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, list[float]]:
    """Errors of every layer's keys and values in the converted model, by the kind of run that made the sums."""
    folder = write(tmp_path_factory.mktemp("prefix") / "source", "qwen3", num_hidden_layers=12)
    config = checkpoint.read_config(folder)
    runs = {kind.__name__: kind.open(folder, config, "", texts, "cpu") for kind in (Run, Unconverted)}
    source = Source.of(folder, config)
    sides = {name: one_shot(source, run, "lowrank:rank=8").sides for name, run in runs.items()}
    return {name: layer_errors(runs["Run"], found) for name, found in sides.items()}


def test_sums_over_unconverted_layers_lose_more_in_the_converted_model(errors):
    ours, theirs = (errors[name] for name in ("Run", "Unconverted"))
    assert len(ours) == 24 and ours[:2] == pytest.approx(theirs[:2]), "before the first layer nothing differs"
    assert all(a < b for a, b in zip(ours[2:4], theirs[2:4])), "the second layer's inputs are the same in both"
    assert sum(a < b for a, b in zip(ours[2:], theirs[2:])) >= 20 and sum(ours) < sum(theirs)


def test_the_pass_loses_what_it_said(tmp_path):
    """Energies that conversion.json records are those of the converted model: the pass ran over converted layers. The
    control says something else."""
    folder = write(tmp_path / "source", "qwen3", num_hidden_layers=3)
    config = checkpoint.read_config(folder)
    right = Run.open(folder, config, "", texts, "cpu")
    for run in (right, Unconverted.open(folder, config, "", texts, "cpu")):
        made = one_shot(Source.of(folder, config), run, "lowrank:rank=8")
        said = [1 - share for pair in made.record["energy"] for share in pair]
        assert (layer_errors(right, made.sides) == pytest.approx(said, abs=1e-5)) == (run is right)
