"""Adapters merged and exported: the same function as the oracle, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors
from kvasir.models.peft import PeftFolder
from tests.adapters import matrices, merge, write_adapter

NANO = checkpoint.resolve("nano")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def converted(spec: str, target: Path) -> dict[str, torch.Tensor]:
    convert(load_converter(spec), spec, NANO, target)
    return {name: tensor.float() for name, tensor in read_tensors(target)}


def change(folder: Path, tensors: dict[str, torch.Tensor], **config) -> None:
    """Add tensors and settings to an adapter."""
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": t for name, t in tensors.items()}, file)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))


def base() -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in read_tensors(NANO)}


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}], ids=str)
def test_merged_is_the_sum(tmp_path, config):
    adapter = write_adapter(tmp_path / "a", rank=4, alpha=12, **config)
    want = dict(read_tensors(merge(adapter, tmp_path / "want")))
    found = converted(f"merge_lora:adapter={adapter}", tmp_path / "found")
    assert found.keys() == want.keys()
    dtype = dict(read_tensors(NANO))[EMBED].dtype
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name].to(dtype).float()), name
    assert any(not torch.equal(found[name], w) for name, w in base().items()), "nothing was merged"


def test_dora_scales_rows(tmp_path):
    adapter = write_adapter(tmp_path / "a", rank=4, alpha=4, targets=("q_proj",))
    module = next(m for m in matrices() if m.endswith("q_proj"))
    magnitude = torch.rand(matrices()[module][0]) + 0.5
    change(adapter, {f"{module}.lora_magnitude_vector": magnitude}, use_dora=True)
    found = converted(f"merge_lora:adapter={adapter}", tmp_path / "found")[f"{module}.weight"]
    torch.testing.assert_close(found.norm(dim=1), magnitude, rtol=1e-2, atol=0)


def test_whole_modules_and_new_tokens(tmp_path):
    adapter = write_adapter(tmp_path / "a", rank=4)
    rows, width = base()[EMBED].shape
    embed = torch.randn(rows + 8, width)
    change(adapter, {EMBED: embed}, modules_to_save=["embed_tokens"])
    config = checkpoint.read_config(NANO)
    if not config.get("tie_word_embeddings"):
        change(adapter, {HEAD: embed * 2})
    found = converted(f"merge_lora:adapter={adapter}", tmp_path / "found")
    assert torch.allclose(found[EMBED], embed, rtol=1e-2)
    assert checkpoint.read_config(tmp_path / "found")["vocab_size"] == rows + 8


def test_a_head_of_its_own_is_untied(tmp_path):
    config = checkpoint.read_config(NANO)
    if not config.get("tie_word_embeddings"):
        pytest.skip("the head is its own already")
    rows, width = base()[EMBED].shape
    adapter = write_adapter(tmp_path / "a", rank=4)
    a, b = torch.randn(2, width), torch.randn(rows, 2)
    change(adapter, {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b})
    found = converted(f"merge_lora:adapter={adapter}", tmp_path / "found")
    want = base()[EMBED] + 8 * b @ a  # alpha 16 over rank 2
    torch.testing.assert_close(found[HEAD], want, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[EMBED], base()[EMBED])
    assert checkpoint.read_config(tmp_path / "found")["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "tensors, config, why",
    [
        ({"nowhere.lora_A.weight": torch.ones(2, 3), "nowhere.lora_B.weight": torch.ones(3, 2)}, {}, "does not have"),
        ({}, {"layer_replication": [[0, 2]]}, "layer_replication"),
        ({}, {"init_lora_weights": "pissa"}, "changed base"),
    ],
)
def test_refusals(tmp_path, tensors, config, why):
    adapter = write_adapter(tmp_path / "a", rank=4)
    change(adapter, tensors, **config)
    with pytest.raises(ConfigError, match=why):
        converted(f"merge_lora:adapter={adapter}", tmp_path / "found")
    assert not (tmp_path / "found").exists()


# -------------------------------------------------------------------------------------------------------------- exports


def trained(folder: Path, method: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a random training form. Returns W of every trained module after training, by the method's own formula."""
    generator = torch.Generator().manual_seed(seed)
    weights, stored, after = base(), {}, {}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    for module, (n, k) in matrices().items():
        w = weights[f"{module}.weight"]
        if method in ("lora", "corda", "hydra"):
            parts = {"A": normal(4, k), "B": normal(n, 4)}
            change = 2.0 * parts["B"] @ parts["A"]
            if method == "corda":
                parts |= {"A0": normal(4, k), "B0": normal(n, 4)}
                change -= 2.0 * parts["B0"] @ parts["A0"]
            if method == "hydra":
                parts |= {"As": normal(3, n), "Bs": normal(n, 3)}
                change += 2.0 * parts["Bs"] @ (parts["As"] @ w)
        elif method == "paca":
            columns = torch.randperm(k, generator=generator)[:5].int()
            parts = {"columns": columns, "values": normal(n, 5)}
            change = torch.zeros(n, k)
            change[:, columns.long()] = parts["values"] - w[:, columns.long()]
        else:
            # Factors of rank one and two, so that the sum has a rank that an adapter can have.
            parts = {"U": normal(2, n // 8, 2) @ normal(2, 2, 4), "V": normal(2, 8, 1) @ normal(2, 1, k // 4)}
            parts["s"] = torch.tensor([1.0, 0.5])
            change = 2.0 * sum(s * torch.kron(u, v) for s, u, v in zip(parts["s"], parts["U"], parts["V"]))
        stored |= {f"{module}.{name}": part.contiguous() for name, part in parts.items()}
        after[module] = w + change
    folder.mkdir()
    save_file(stored, folder / "training.safetensors")
    (folder / "training.json").write_text(json.dumps({"method": method, "scale": 2.0}))
    return after


@pytest.mark.parametrize("method", ["lora", "corda", "paca", "hydra", "soka"])
def test_an_export_computes_what_was_trained(tmp_path, method):
    after = trained(tmp_path / "trained", method)
    spec = f"to_lora:method={method},trained={tmp_path / 'trained'}"
    convert(load_converter(spec), spec, NANO, tmp_path / "adapter")
    folder = PeftFolder(tmp_path / "adapter")
    folder.refuse_unserved([], "")
    weights, seen = base(), set()
    for update in folder.updates(folder.tensors()):
        found = weights[f"{update.module}.weight"] + update.scale * update.b_NR @ update.a_RK
        torch.testing.assert_close(found, after[update.module], rtol=1e-3, atol=1e-3 if method == "soka" else 1e-5)
        seen.add(update.module)
    assert seen == set(after)


def test_an_export_that_would_lose_much_is_refused(tmp_path):
    trained(tmp_path / "trained", "soka")
    spec = f"to_lora:method=soka,rank=1,trained={tmp_path / 'trained'}"
    with pytest.raises(ConfigError, match="singular vectors lose"):
        convert(load_converter(spec), spec, NANO, tmp_path / "adapter")


def test_another_method_is_named(tmp_path):
    trained(tmp_path / "trained", "paca")
    spec = f"to_lora:method=corda,trained={tmp_path / 'trained'}"
    with pytest.raises(ConfigError, match="method=paca"):
        convert(load_converter(spec), spec, NANO, tmp_path / "adapter")
