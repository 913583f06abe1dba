"""Adapters and sets of hooks from strangers: an error that names folder and field, before a request meets it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import HEAD, TAIL, ConfigError, RequestError, bounded
from kvasir.hooks.hook import CARD, WEIGHTS, Gate, read_set
from kvasir.models.adapters import Adapter, AdapterSlots
from kvasir.models.peft import PeftFolder
from tests.adapters import write_adapter
from tests.engine.driver import Driver

NAN, INF, LONG = float("nan"), float("inf"), 10**400
PREFIX = "base_model.model."
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
# Anything that JSON as Python reads it may have in place of a number, a text, a list or an object.
VALUES = [None, True, 0, -1, 0.5, 1e308, NAN, INF, LONG, "", "x", [], [None] * 50_000, {}, {"q_proj": NAN}]
VALUES += [{"q_proj": LONG}, {"q_proj": 1e308}, {"q_proj": True}, {"(a+)+$": 1}, "\ud800"]
FIELDS = ["peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "target_modules", "bias"]
FIELDS += ["modules_to_save", "layers_to_transform", "init_lora_weights", "base_model_name_or_path", "use_dora"]


@pytest.fixture(scope="module")
def slots():
    driver = Driver(enable_lora=True)
    yield driver.engine.runner.model.adapters
    driver.close()


def read(slots: AdapterSlots, folder: Path) -> Adapter:
    """Read an adapter as a server does. One that is accepted has finite matrices."""
    adapter = slots.read("x", folder, "nano")
    assert all(bool(x.isfinite().all()) for pair in adapter.pairs.values() for x in (pair.a_PRK, pair.b_NR))
    return adapter


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_a_field(tmp_path, slots, field):
    folder = write_adapter(tmp_path / "x", targets=("q_proj",))
    card = json.loads((folder / "adapter_config.json").read_text())
    for value in VALUES:
        (folder / "adapter_config.json").write_text(json.dumps(card | {field: value}))
        try:
            read(slots, folder)
        except ConfigError as e:
            assert str(folder) in str(e) and len(str(e)) < 1000, value


@pytest.mark.parametrize(
    "field, value",
    [("r", NAN), ("r", INF), ("lora_alpha", LONG), ("lora_alpha", 1e308), ("alpha_pattern", NAN)],
    ids=lambda value: str(value)[:16],
)
def test_numbers_that_no_float_holds(tmp_path, slots, field, value):
    given = {"q_proj": value} if field == "alpha_pattern" else value
    folder = write_adapter(tmp_path / "x", targets=("q_proj",), **{field: given} if field == "alpha_pattern" else {})
    card = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(card | {field: given}))
    with pytest.raises(ConfigError, match="lora_alpha" if value == 1e308 else field):
        read(slots, folder)


TENSORS = {
    "NaN": ({f"{Q}.lora_A.weight": torch.full((8, 192), NAN)}, "NaN or infinity"),
    "infinity": ({f"{Q}.lora_B.weight": torch.full((256, 8), INF)}, "NaN or infinity"),
    "beyond fp32 when scaled": ({f"{Q}.lora_B.weight": torch.full((256, 8), 3e38)}, "times its scale"),
    "rank 0": ({f"{Q}.lora_A.weight": torch.ones(0, 192), f"{Q}.lora_B.weight": torch.ones(256, 0)}, r"\(0, 192\)"),
    "integers": ({f"{Q}.lora_A.weight": torch.ones(8, 192, dtype=torch.int8)}, "floating point"),
    "complex": ({f"{Q}.lora_A.weight": torch.ones(8, 192, dtype=torch.complex64)}, "floating point"),
    "B alone": ({f"{PREFIX}model.layers.1.self_attn.x.lora_B.weight": torch.ones(8, 8)}, "no lora_A"),
    "twice": ({f"{Q.removeprefix(PREFIX)}.lora_A.weight": torch.ones(8, 192)}, "twice"),
    "a long name": ({f"{'x' * 1_000_000}.lora_A.weight": torch.ones(8, 192)}, "lora_B"),
    "a path": ({f"{PREFIX}../../x.lora_{ab}.weight": torch.ones(8, 8) for ab in "AB"}, "the base model has no"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(tmp_path, slots, kind):
    extra, why = TENSORS[kind]
    folder = write_adapter(tmp_path / "x", targets=("q_proj",))
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | extra, file)
    with pytest.raises(ConfigError, match=why) as refused:
        read(slots, folder)
    assert str(folder) in str(refused.value) and len(str(refused.value)) <= HEAD + TAIL + 40


def test_usual_types_are_read(tmp_path, slots):
    folder = write_adapter(tmp_path / "x", targets=("q_proj",))
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        save_file({name: x.to(dtype) for name, x in stored.items()}, file)
        assert read(slots, folder).info.rank == 8


def test_a_file_larger_than_any_adapter_of_the_model_is_not_read(tmp_path, slots, monkeypatch):
    folder = write_adapter(tmp_path / "x", targets=("q_proj",))
    file = folder / "adapter_model.safetensors"
    rows = 400_000
    save_file(load_file(file) | {f"{Q}.lora_A.weight": torch.zeros(rows, 192)}, file)
    assert slots.most_bytes() < os.path.getsize(file) < 2 * slots.most_bytes() + (1 << 30)
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_: pytest.fail("the tensors were read"))
    monkeypatch.setattr(PeftFolder, "key", lambda _: pytest.fail("all bytes were read"))
    with pytest.raises(ConfigError, match="another base model"):
        slots.read("x", folder, "nano")


def test_messages_are_bounded_and_keep_their_ends():
    for made in (ConfigError, RequestError):
        text = str(made("begin" + "x" * 10**6 + "end"))
        assert text.startswith("begin") and text.endswith("end") and len(text) < HEAD + TAIL + 40
    assert bounded("x" * (HEAD + TAIL)) == "x" * (HEAD + TAIL)


# -------------------------------------------------------------------------------------------------------------- hooks

HOOK = {"site": "resid", "layers": [0], "gate": "all", "op": "add", "params": "hook"}


def write_set(folder: Path, card: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CARD).write_text(json.dumps(card))
    return folder


def test_a_set_runs_no_code_out_of_a_folder(tmp_path):
    """A set is data. A file that it named was imported, whoever had written it."""
    ran = tmp_path / "ran"
    code = tmp_path / "own.py"
    code.write_text(f"open({str(ran)!r}, 'w').close()")
    folder = write_set(tmp_path / "set", {"hooks": [HOOK | {"op": str(code)}]})
    with pytest.raises(ConfigError, match="names an installed operation"):
        read_set("x", folder)
    assert not ran.exists()


@pytest.mark.parametrize("field", [*HOOK, "model", "hooks"])
def test_any_value_of_a_field_of_a_set(tmp_path, field):
    for value in VALUES:
        card = {"hooks": [HOOK | {field: value}]}
        if field in ("model", "hooks"):
            card = {"hooks": [HOOK]} | {field: value}
        folder = write_set(tmp_path / "set", card)
        try:
            assert read_set("x", folder).info.name == "x"
        except ConfigError as e:
            assert str(folder) in str(e)
    for part in ("layers", "heads", "head_dim", "hidden_size", "hash"):
        made = {"layers": 4, "heads": 4, "head_dim": 64, "hidden_size": 192} | {part: [1]}
        with pytest.raises(ConfigError, match=part):
            read_set("x", write_set(tmp_path / "set", {"model": made, "hooks": [HOOK]}))


@pytest.mark.parametrize("window", [[10**30, 10**31], [-1, 5], [5, 5], [5, 2], [0, 1 << 31]])
def test_windows_outside_the_positions_are_refused(window):
    with pytest.raises(ConfigError, match="first position < end"):
        Gate.read({"window": window})


def test_many_tokens_in_two_gates_take_no_time():
    many = list(range(200_000))
    assert Gate.read([{"token_in": many}, {"token_in": many[::2]}]).tokens == tuple(many[::2])


@pytest.mark.parametrize("stored", ["garbage", "a long header", "NaN", "nesting"])
def test_damaged_files_of_a_set(tmp_path, stored):
    folder = write_set(tmp_path / "set", {"hooks": [HOOK]})
    if stored == "NaN":
        save_file({"hook.0.direction": torch.full((192,), NAN)}, folder / WEIGHTS)
    elif stored == "nesting":
        (folder / CARD).write_text("[" * 100_000)
    else:
        (folder / WEIGHTS).write_bytes(b"x" * 100 if stored == "garbage" else (10**15).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=str(folder)):
        read_set("x", folder)
