"""The speculation benchmark end to end on the smallest model, and its measure of repetition."""

import json

import pytest

from kvasir.bench.workloads import SHAPES
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir_lab.bench import speculation
from tests.bench.helpers import SMALL

COMMON = dict(
    shape=None,
    drafters=None,
    tasks=["chain"],
    accepts=None,
    batch=[2],
    count=2,
    prompt=16,
    output_tokens=24,
    temperature=0.0,
    repeats=1,
    seconds=60.0,
    output=None,
    commit="x",
)


def test_repeated_grams_are_counted_within_an_output():
    assert speculation.repeated_grams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 0.0
    assert speculation.repeated_grams([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert speculation.repeated_grams([[1]]) == 0.0


def test_arms_and_their_figures(capsys):
    config = EngineConfig.of(model="nano", num_threads=1, max_model_len=512)
    speculation.run(config, **COMMON | dict(drafters=["draft_model:model=nano"], accepts=[1.0]))
    arms = {a["name"]: a["metrics"] for a in json.loads(capsys.readouterr().out)["arms"]}
    drafters = "draft_model:model=nano", "replay:accept=1"
    assert list(arms) == ["plain", *(f"{name} {control}" for name in drafters for control in ("fixed", "goodput"))]
    assert arms["plain"]["tokens_per_forward"] <= 2 < arms["replay:accept=1 fixed"]["tokens_per_forward"]
    assert all(arms[name]["same_outputs"] == 1 for name in list(arms)[1:])
    assert arms["draft_model:model=nano fixed"]["accepted_by_depth"]["1"] == 1, "it is the served model itself"


def test_a_shape_is_measured_in_one_process(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "small", SMALL)
    config = EngineConfig.of(num_threads=1, num_pages=64, max_num_batched_tokens=64)
    file = tmp_path / "speculation.json"
    speculation.run(
        config,
        **COMMON | dict(shape="small", tasks=None, accepts=[0.0, 1.0], batch=[1, 2], output_tokens=40, output=file),
    )
    found = json.loads(file.read_text())
    assert not capsys.readouterr().out
    arms = {a["name"]: a["metrics"] for a in found["arms"]}
    for batch in (1, 2):
        assert (
            arms[f"plain {batch}"]["decode_tok_s"]["n"] == 2 and arms[f"plain {batch}"]["tokens_per_forward"] <= batch
        )
        assert arms[f"fixed8 accept=1 {batch}"]["tokens_per_forward"] > 4 * batch
        assert arms[f"fixed8 accept=1 {batch}"]["same_outputs"] == 1
        assert {"of_plain", "of_best_fixed", "draft_steps"} <= set(arms[f"goodput accept=0 {batch}"])
        assert arms[f"goodput accept=0 {batch}"]["accepted"] == 0
    assert any("accept=0" in name for name in found["ratios"])


def test_a_call_goes_on_from_the_one_before(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "small", SMALL)
    config = EngineConfig.of(num_threads=1, num_pages=64, max_num_batched_tokens=64)
    file = tmp_path / "speculation.json"
    given = COMMON | dict(shape="small", tasks=None, accepts=[1.0], output_tokens=24, output=file)

    def call(**more) -> dict[str, dict]:
        speculation.run(config, **given | more)
        return {a["name"]: a for a in json.loads(file.read_text())["arms"]}

    first = call(batch=[1, 2])
    assert list(first) == [*speculation.names_of(1, [1.0]), *speculation.names_of(2, [1.0])]
    cut = json.loads(file.read_text())
    cut["arms"] = [a for a in cut["arms"] if a["name"] != "fixed8 accept=1 2"]
    file.write_text(json.dumps(cut))
    second = call(batch=[1, 2])
    assert list(second) == list(first)
    assert [name for name in first if second[name] == first[name]] == speculation.names_of(1, [1.0]), (
        "half a batch is none"
    )
    monkeypatch.setattr(speculation, "Sweep", None)
    assert call(batch=[1, 2]) == second, "nothing is left to do: not even a model is loaded"
    for other in (dict(commit="y"), dict(output_tokens=30), dict(repeats=2)):
        with pytest.raises(TypeError):
            call(batch=[1, 2], **other)


def test_random_weights_say_nothing_of_drafters():
    with pytest.raises(ConfigError, match="--accept"):
        speculation.run(EngineConfig.of(), **COMMON | dict(shape="llama-8b", drafters=["ngram"]))
