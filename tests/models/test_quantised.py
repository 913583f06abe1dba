"""Quantised checkpoints: every format and reader against the same model dequantised, and what must fail."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.errors import ConfigError
from kvasir.kernels import f8
from kvasir.kernels.f8 import E4M3, F8
from kvasir.layers.weights import Placement
from kvasir.models import checkpoint
from kvasir.models.decoder import Decoder
from kvasir.models.digest import digest
from kvasir.models.families import build_spec
from kvasir.models.loader import load_again, load_model, read_headers
from tests import checkpoints, quantised, weights_page
from tests.models.test_parity import Paged, expected

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
MODELS = {
    "llama": ("llama", SIZES),
    "fused": ("phi3", SIZES),  # q, k and v in one tensor, gate and up in another
    "experts": ("qwen3_moe", SIZES | dict(moe_intermediate_size=16, mlp_only_layers=[1])),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a model in a format, made once: ``made`` and ``plain``."""
    root, made = tmp_path_factory.mktemp("quantised"), {}

    def get(model: str, name: str):
        if (model, name) not in made:
            variant, changes = MODELS[model]
            source = root / model
            if not source.exists():
                checkpoints.write(source, variant, **changes)
            made[model, name] = quantised.write(source, root / f"{model}-{name}", name)
        return made[model, name]

    return get


def load(folder, **options):
    config = checkpoint.read_config(folder)
    return load_model(folder, config, **(dict(device="cpu", dtype=torch.float32) | options))


def logits(folder, chunk=64, exact=False):
    return Paged(folder, exact).run(lambda i: chunk)


def test_all_codes_against_a_table():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    got = f8.dequantise_reference(F8(codes.view(E4M3), torch.ones(1)), torch.float32)
    torch.testing.assert_close(got[0].double(), quantised.e4m3_table(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [0, 16])
def test_quantising_takes_the_nearest_code(block):
    w = torch.randn(40, 56, generator=torch.Generator().manual_seed(0))
    made = f8.quantise(w, block)
    want = quantised.nearest_codes(w.float() / f8.wide_scale(made))
    table = quantised.e4m3_table()
    ratio = (w.float() / f8.wide_scale(made)).double()
    theirs, ours = (table[want.long()] - ratio).abs(), (made.codes.double() - ratio).abs()
    assert torch.equal(theirs, ours), "the same distance, also where two codes are equally near"
    assert (made.codes.float().abs().amax(-1) == 448).any(-1).all(), "the largest weight gets the largest code"
    again = f8.quantise(f8.dequantise_reference(made, torch.float32), block)
    assert torch.equal(again.codes.view(torch.uint8), made.codes.view(torch.uint8)), "a round trip changes nothing"


QUICK = {"experts": ("fp8-block",), "fused": ("compressed-tensor",)}  # in every commit
PAIRS = [
    pytest.param(model, name, marks=[pytest.mark.slow] if model != "llama" and name not in QUICK[model] else [])
    for model in MODELS
    for name in quantised.FORMATS
]


@pytest.mark.parametrize("model, name", PAIRS)
def test_logits_are_those_of_transformers_with_dequantised_weights(model, name, folders):
    folder = folders(model, name)
    want = expected(folder / "plain")
    for chunk in (64, 5):
        for got, reference in zip(logits(folder / "made", chunk), want):
            torch.testing.assert_close(got, reference, atol=2e-5, rtol=1e-4)


def test_transformers_reads_the_same_file_alike(folders):
    """Its own reader of blocks, which dequantises on a CPU."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    folder = folders("llama", "fp8-block") / "made"
    config = transformers.FineGrainedFP8Config(
        weight_block_size=(quantised.BLOCK,) * 2, modules_to_not_convert=["lm_head"], dequantize=True
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    ours = load(folder)
    for i, layer in enumerate(theirs.model.layers):
        want = torch.cat([p.weight.float() for p in (layer.mlp.gate_proj, layer.mlp.up_proj)])
        got = ours.blocks[i].ffn.gate_up.weight.dequantise()
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)  # they round to bf16


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_the_weights_stay_quantised(model, name, folders):
    """Resident bytes: what is dequantised at loading would pass every other test."""
    folder = folders(model, name)
    decoder, plain = load(folder / "made"), load(folder / "plain")
    want = sum(t.num_bytes for t in read_headers(folder / "made") if t.dtype == "F8_E4M3")
    codes = sum(w.planes["weight"].nbytes for w in decoder.weights() if "scale" in w.planes)
    assert codes == want
    assert sum(w.num_bytes for w in decoder.weights()) < 0.6 * sum(w.num_bytes for w in plain.weights())
    assert decoder.weight_bytes < plain.weight_bytes == 4
    before = {id(p): p.nbytes for w in decoder.weights() for p in w.planes.values()}
    logits(folder / "made")
    assert {id(p): p.nbytes for w in decoder.weights() for p in w.planes.values()} == before
    assert all(not isinstance(w.made, torch.Tensor) for w in decoder.weights())


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
def test_exact_mode_is_bit_equal_over_batches(name, folders):
    folder = folders("llama", name) / "made"
    whole = logits(folder, 64, exact=True)
    for got, want in zip(logits(folder, 7, exact=True), whole):
        assert torch.equal(got, want)


def test_a_quantised_matrix_that_a_layer_keeps_plain_is_dequantised(folders, tmp_path):
    """A router here; layers that rearrange a matrix have no other choice."""
    folder, router = folders("experts", "fp8-block"), "model.layers.0.mlp.gate.weight"
    made, plain = (load_file(folder / name / "model.safetensors") for name in ("made", "plain"))
    codes, made[router + "_scale_inv"], values = quantised.by_block(made[router])
    made[router], plain[router] = codes.view(E4M3), values.float()
    config = json.loads((folder / "made" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    for name, tensors in (("made", made), ("plain", plain)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    (tmp_path / "plain" / "config.json").write_text((folder / "plain" / "config.json").read_text())
    decoder = load(tmp_path / "made")
    assert torch.equal(decoder.blocks[0].ffn.router.weight.tensor, plain[router])
    for got, want in zip(logits(tmp_path / "made"), expected(tmp_path / "plain")):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    load_again(decoder, tmp_path / "made")
    assert torch.equal(decoder.blocks[0].ffn.router.weight.tensor, plain[router])
    del made[router + "_scale_inv"]
    save_file(made, tmp_path / "made" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="missing tensors: model.layers.0.mlp.gate.weight_scale_inv"):
        load(tmp_path / "made")


# ------------------------------------------------------------------------------------------------------ what must fail


@pytest.mark.parametrize("mutation", ["a neighbour's scales", "inverse scales", "scales forgotten"])
@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
def test_wrong_scales_show_in_the_logits(name, mutation, folders, tmp_path):
    folder = folders("llama", name)
    tensors = load_file(folder / "made" / "model.safetensors")
    for key in [k for k in tensors if "scale" in k]:
        s = tensors[key]
        wrong = {"a neighbour's scales": s.roll(1, 0), "inverse scales": 1 / s, "scales forgotten": torch.ones_like(s)}
        tensors[key] = wrong[mutation].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "made" / "config.json").read_text())
    want, got = expected(folder / "plain"), logits(tmp_path)
    assert max((g - w).abs().max() for g, w in zip(got, want)) > 0.05


# ---------------------------------------------------------------------------------------- quantised as they are loaded


@pytest.mark.parametrize("model", ["llama", "experts"])
@pytest.mark.parametrize("spec", ["f8", "f8:scale=block,block=16", "fp8"])
def test_a_plain_checkpoint_is_quantised_at_loading(model, spec, folders):
    folders(model, "fp8-block")
    folder = folders(model, "fp8-block").parent / model
    made, plain = load(folder, weights=spec), load(folder)
    assert made.weight_bytes < 2 and made.head.format.name == "plain"
    for ours, theirs in zip(made.weights(), plain.weights()):
        if ours.format.name == "plain":
            continue
        w = theirs.dequantise()
        for i, whole in enumerate(w if w.dim() == 3 else [w]):
            first = 0
            for width in ours.widths.values():
                part = (ours if w.dim() == 2 else ours[i]).dequantise()[first : first + width]
                want = f8.quantise(whole[first : first + width], ours.format.block)
                assert torch.equal(part, f8.dequantise_reference(want, torch.float32))
                first += width
    assert digest(made) == digest(load(folder, weights=spec)) != digest(plain)
    load_again(made, folder)  # update_weights
    assert digest(made) == digest(load(folder, weights=spec))


def test_dummy_weights_have_the_scale_of_plain_ones(folders):
    folder = folders("experts", "fp8-block") / "made"
    decoder = load(folder, load_format="dummy")
    for weight in decoder.weights():
        assert weight.dequantise().std() * weight.num_inputs**0.5 == pytest.approx(1, abs=0.15)
    assert "scale" not in decoder.head.planes


def test_update_weights_keeps_the_format(folders):
    folder = folders("llama", "compressed-channel")
    decoder = load(folder / "made")
    before = digest(decoder)
    for weight in decoder.weights():
        if "scale" in weight.planes:
            weight.planes["scale"].zero_()
    load_again(decoder, folder / "made")
    assert digest(decoder) == before


@pytest.mark.parametrize("spec, scale", [("quantise:format=f8", "f8"), ("quantise:scale=block", "f8:scale=block")])
def test_a_converted_checkpoint_is_what_loading_makes(spec, scale, tmp_path):
    source = checkpoints.write(tmp_path / "source", "qwen3_moe", **SIZES | dict(moe_intermediate_size=128, head_dim=64))
    (source / "tokenizer.json").write_text("{}")
    record = convert(load_converter(spec), spec, source, tmp_path / "made")
    assert not record["exact"] and record["bytes"] < 0.5 * sum(t.num_bytes for t in read_headers(source))
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    ignore = config.get("ignore") or config["modules_to_not_convert"]
    assert "lm_head" in ignore and "model.layers.0.mlp.gate" in ignore and not any("proj" in name for name in ignore)
    made, loaded = load(tmp_path / "made"), load(source, weights=scale)
    assert digest(made) == digest(loaded)
    with pytest.raises(ConfigError, match="is quantised"):
        convert(load_converter("pack"), "pack", tmp_path / "made", tmp_path / "again")


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_is_not_served_is_refused_by_name(folders):
    base = json.loads((folders("llama", "fp8-block") / "plain" / "config.json").read_text())
    group = quantised.compressed("channel")["config_groups"]["group_0"]

    def compressed(**changes):
        return quantised.compressed("channel") | changes

    def changed(**changes):
        return compressed(config_groups={"group_0": {**group, "weights": {**group["weights"], **changes}}})

    for config, words in (
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt 'e5m2'"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, ["weight_block_size [128, 64]"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes", "served are"]),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "sparse-24"]),
        (compressed(format="marlin-24"), ["marlin-24"]),
        (compressed(transform_config={"config_groups": {"u": {}}}), ["transform_config"]),
        (compressed(config_groups={}), ["config_groups"]),
        (changed(symmetric=False), ["zero points"]),
        (changed(strategy="group"), ["strategy 'group'"]),
        (changed(num_bits=4), ["4 bits"]),
    ):
        with pytest.raises(ConfigError) as error:
            checkpoint.refuse_unserved(base | {"quantization_config": config})
        assert all(word in str(error.value) for word in words), error.value


def test_combinations_that_cannot_be_had(folders):
    folder = folders("llama", "fp8-block")
    with pytest.raises(ConfigError, match="is quantised already"):
        load(folder / "made", weights="f8")
    load(folder / "made", weights="fp8")  # vLLM's users name the method of a quantised checkpoint
    with pytest.raises(ConfigError, match="needs a GPU"):
        load(folder / "made", activations="fp8")
    with pytest.raises(ConfigError, match="exact mode"):
        load(folder / "made", activations="fp8", exact=True)
    with pytest.raises(ConfigError, match="no formats named 'f9'"):
        load(folder / "plain", weights="f9")
    with pytest.raises(ConfigError, match="two of its matrices share"):
        load(folder / "plain", weights="f8:scale=block,block=32")


def test_a_format_that_is_only_read_is_not_converted_to(tmp_path):
    source, spec = checkpoints.write(tmp_path / "source", "llama"), "quantise:format=mxfp4"
    with pytest.raises(ConfigError, match="mxfp4 are read and not written"):
        convert(load_converter(spec), spec, source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("module", ["self_attn.k_proj", "mlp.up_proj"])
def test_parts_of_a_product_may_have_formats_of_their_own(module, folders, tmp_path):
    folder, module = folders("llama", "compressed-channel"), f"model.layers.0.{module}"
    made, plain = (load_file(folder / name / "model.safetensors") for name in ("made", "plain"))
    del made[module + ".weight_scale"]
    made[module + ".weight"] = plain[module + ".weight"]
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "made" / "config.json").read_text())
    want = logits(folder / "plain")
    for got, reference in zip(logits(tmp_path), want):
        torch.testing.assert_close(got, reference, atol=2e-5, rtol=1e-4)
    block = load(tmp_path).blocks[0]
    weight = (block.mixer.qkv if "attn" in module else block.ffn.gate_up).weight
    assert weight.format.name == "mixed" and weight.num_bytes < 4 * weight.num_outputs * weight.num_inputs * 0.8
    assert digest(load(tmp_path)) == digest(load(tmp_path))


def test_a_missing_scale_is_named(folders, tmp_path):
    folder = folders("llama", "fp8-block") / "made"
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="missing tensors: model.layers.1.mlp.up_proj.weight_scale_inv"):
        load(tmp_path)


def test_ignored_modules_by_name_and_by_pattern():
    from kvasir.models.patterns import ModuleList

    patterns = ModuleList(["lm_head", "model.layers.0.mlp.gate", "re:.*vision.*", "model.layers.7"], "ignore")
    for module in ("lm_head", "model.layers.0.mlp.gate", "model.vision.x", "model.layers.7.mlp.up_proj"):
        assert module in patterns, module
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.70.mlp.up_proj", "model.layers.1.mlp.gate"):
        assert module not in patterns, module


def test_a_decoder_knows_its_bytes_before_it_is_loaded(folders):
    """Sizes on the meta device, as the loader checks a checkpoint."""
    folder = folders("llama", "fp8-block") / "made"
    made, config = load(folder), checkpoint.read_config(folder)
    place = Placement(torch.device("meta"), torch.float32, formats=made.place.formats)
    assert Decoder(build_spec(config), place, 1).weight_bytes == made.weight_bytes


def test_the_page_has_a_row_for_every_format_and_reader():
    assert weights_page.PAGE.read_text() == weights_page.page(), "write it again: python -m tests.weights_page"
