"""Loading weights: into the right place, with little memory; every fault of a checkpoint named by file and tensor."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ConfigError
from kvasir.models import checkpoint, cost, fill, loader
from kvasir.models.families import find_family
from kvasir.models.fields import stored_name
from kvasir.models.loader import load_model, read_header
from kvasir.models.stored import View, view_of
from tests import checkpoints


def load(folder, **options):
    options = {"device": "cpu", "dtype": torch.float32} | options
    return load_model(folder, checkpoint.read_config(folder), **options)


def same(a, b):
    return all(torch.equal(x.target, y.target) for x, y in zip(a.slots().values(), b.slots().values(), strict=True))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("tied"), "llama_llama3")


@pytest.fixture
def llama(tmp_path):
    return checkpoints.write(tmp_path, "llama")


@pytest.fixture
def sharded(tmp_path):
    folder = checkpoints.write(tmp_path, "qwen2", shards=True)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def rewrite(folder, edit):
    """Edit the tensors of an unsharded checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def refused(folder, *words, **options):
    with pytest.raises(ConfigError) as e:
        load(folder, **options)
    for word in words:
        assert word in str(e.value), str(e.value)


# --------------------------------------------------------------------------------------------------------- good ones


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_every_stored_number_has_one_place(variant, tmp_path):
    """The slots hold the stored weights (except Gemma's norms, which add one), and the cost counts them."""
    folder = checkpoints.write(tmp_path, variant)
    decoder = load(folder)
    stored = load_file(folder / "model.safetensors")
    family = loader.find_family(decoder.spec.family)
    stored = {loader.renamed(name, getattr(family, "RENAMED", {})): tensor for name, tensor in stored.items()}
    stored = {name: t for name, t in stored.items() if not name.startswith(getattr(family, "LEFT_OUT", ()))}
    otherwise = getattr(family, "stored_otherwise", lambda *_: None)
    names = {name: view_of(family.stored(name, decoder.spec)) for name in decoder.slots()}
    names |= {name: otherwise(name, decoder.spec) or view for name, view in names.items() if view.name not in stored}
    assert {view.name for view in names.values()} == stored.keys()
    for name, slot in decoder.slots().items():
        first = slot.target[0] if slot.repeat else slot.target
        want = stored[names[name].name][names[name].index]
        assert torch.equal(first, (want.mT if names[name].transposed else want) + slot.offset), name
    assert cost.num_params(decoder.spec) == sum(t.numel() for t in stored.values())


def test_shards_load_as_one_file_does(sharded, tmp_path_factory):
    assert same(load(sharded), load(checkpoints.write(tmp_path_factory.mktemp("whole"), "qwen2")))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_dtypes_convert(stored, llama):
    rewrite(llama, lambda t: t.update({n: v.to(stored) for n, v in t.items()}))
    want = load_file(llama / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load(llama).head.tensor, want.float())
    assert torch.equal(load(llama, dtype=torch.bfloat16).head.tensor, want.to(torch.bfloat16))


def test_tied_head_is_the_embedding(tied):
    decoder = load(tied)
    assert decoder.head.tensor is decoder.embed_VE and "head.weight" not in decoder.slots()


def test_tied_checkpoint_that_stores_the_head_too(tied, tmp_path):
    for file in tied.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert same(load(tmp_path), load(tied))
    rewrite(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    refused(tmp_path, "tie_word_embeddings", "lm_head.weight", "differs")


def test_old_rotary_buffers_are_not_needed(llama):
    want = load(llama)
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert same(load(llama), want)


def test_dummy_weights(llama):
    config = checkpoint.read_config(llama)
    for file in llama.glob("*.safetensors"):
        file.unlink()
    one, again, other = (load(llama, load_format="dummy", seed=s) for s in (1, 1, 2))
    assert same(one, again) and not same(one, other)
    assert all(s.target.isfinite().all() for s in one.slots().values())
    assert torch.equal(one.norm.weight, torch.ones(32))
    narrow = load_model(llama, {**config, "dtype": "bfloat16"}, device="cpu", dtype=torch.float32, load_format="dummy")
    assert all(torch.equal(s.target, s.target.bfloat16().float()) for s in narrow.slots().values()), (
        "as a checkpoint in bf16 would be"
    )
    assert not torch.equal(one.embed_VE, one.embed_VE.bfloat16().float())
    deep = load_model(
        llama, {**config, "num_hidden_layers": 40}, device="cpu", dtype=torch.float16, load_format="dummy"
    )
    logits = deep.logits(torch.randn(3, 32, dtype=torch.float16))
    assert logits.isfinite().all() and logits.std() > 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_weights_are_named(value, llama, caplog):
    rewrite(llama, lambda t: t["model.layers.1.mlp.up_proj.weight"].view(-1)[5].fill_(value))
    with caplog.at_level("WARNING", logger="kvasir"):
        load(llama)
    assert "model.layers.1.mlp.up_proj.weight" in caplog.text and "layers.0" not in caplog.text


def test_sound_weights_load_without_a_word(llama, caplog):
    rewrite(llama, lambda t: t.update({n: (v * 1e4).clamp(-6e4, 6e4).half() for n, v in t.items()}))
    with caplog.at_level("WARNING", logger="kvasir"):
        load(llama)
    assert not caplog.text


def test_a_long_load_shows_its_progress(llama, monkeypatch):
    shown = []
    monkeypatch.setattr(fill, "PROGRESS_BYTES", 0)
    monkeypatch.setattr(fill.sys.stderr, "isatty", lambda: True, raising=False)
    from rich.progress import Progress

    monkeypatch.setattr(Progress, "advance", lambda self, task, amount: shown.append(amount))
    load(llama)
    assert sum(shown) == sum(t.num_bytes for t in read_header(llama / "model.safetensors"))


def test_loading_imports_no_compiler(llama):
    """The check without memory must not pull in torch's Python decompositions: seconds and hundreds of megabytes."""
    code = (
        "import sys, torch; from pathlib import Path; from kvasir.models import checkpoint; from kvasir.models.loader "
        "import load_model;"
        f"before = set(sys.modules); path = Path({str(llama)!r});"
        "load_model(path, checkpoint.read_config(path), device='cpu', dtype=torch.float32);"
        "new = set(sys.modules) - before; assert not any(n.startswith(('sympy', 'torch._refs', 'torch._decomp')) for n "
        "in new), new"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rope_tables_can_be_shorter(llama):
    assert load(llama, num_positions=10).ropes[0].table.shape == (10, 8)
    assert load(llama).ropes[0].table.shape == (256, 8)


# --------------------------------------------------------------------------------------------------- wrong tensors


def test_missing_tensors(llama):
    rewrite(llama, lambda t: [t.pop(n) for n in ("lm_head.weight", "model.layers.2.self_attn.k_proj.weight")])
    refused(llama, "missing tensors", "lm_head.weight", "model.layers.2.self_attn.k_proj.weight")


def test_long_lists_are_cut(llama):
    rewrite(llama, lambda t: [t.pop(n) for n in list(t) if "layers.1" in n])
    refused(llama, "missing tensors", "and 4 more")


def test_unexpected_tensors(llama):
    rewrite(
        llama,
        lambda t: t.update(
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32), "layers.0.mixer.q.weight": torch.zeros(32, 32)}
        ),
    )
    refused(llama, "unexpected tensors", "model.layers.0.self_attn.q_proj.bias", "layers.0.mixer.q.weight")


def test_missing_and_unexpected_together(llama):
    rewrite(llama, lambda t: t.update({"model.final_norm.weight": t.pop("model.norm.weight")}))
    refused(llama, "missing tensors: model.norm.weight; unexpected tensors: model.final_norm.weight")


def test_a_tensor_that_several_slots_would_read_whole_is_refused(llama, monkeypatch):
    rewrite(llama, lambda t: [t.pop(n) for n in list(t) if "v_proj" in n])
    monkeypatch.setattr(
        find_family("llama"), "stored", lambda slot, spec: stored_name(slot).replace("v_proj", "k_proj")
    )
    refused(llama, "model.layers.0.self_attn.k_proj.weight", "element [0, 0] is read by several slots")


def test_an_element_that_nobody_reads_is_refused(llama, monkeypatch):
    """One row more than the views of a fused tensor read: a shape check of each part alone would not see it."""

    def stored(slot, spec):
        name = stored_name(slot)
        for i, part in enumerate(("gate", "up")):
            if f"{part}_proj" in name:
                return View(name.replace(part, "gate_up"), (slice(56 * i, 56 * (i + 1)),))
        return name

    def fuse(tensors, more=0):
        for name in [n for n in tensors if "gate_proj" in n]:
            both = [tensors.pop(name), tensors.pop(name.replace("gate", "up")), torch.zeros(more, 32)]
            tensors[name.replace("gate", "gate_up")] = torch.cat(both)

    plain = load(llama)
    monkeypatch.setattr(find_family("llama"), "stored", stored)
    rewrite(llama, fuse)
    assert same(plain, load(llama))
    rewrite(llama, lambda t: t.update({n: torch.cat([v, v[:1]]) for n, v in t.items() if "gate_up" in n}))
    refused(llama, "gate_up_proj", "[113, 32]", "element [112, 0] is read by nobody")


def test_what_a_family_leaves_out_is_logged_with_its_bytes(llama, monkeypatch, caplog):
    plain = load(llama)
    extra = {"mtp.norm.weight": torch.ones(1 << 18), "mtp.ids": torch.zeros(2, dtype=torch.int64)}
    rewrite(llama, lambda t: t.update(extra))
    refused(llama, "unexpected tensors: mtp.")
    monkeypatch.setattr(find_family("llama"), "LEFT_OUT", ("mtp.",), raising=False)
    with caplog.at_level("INFO", logger="kvasir"):
        assert same(plain, load(llama))
    assert caplog.text.count("mtp.* (2 tensors, 1.0 MiB)") == 1


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    """They are stored as the layers after the last one; any other layer is one too many."""
    folder = checkpoints.write(tmp_path, "glm4_moe")
    plain = load(folder)
    rewrite(folder, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(32, 64)}))
    with caplog.at_level("INFO", logger="kvasir"):
        assert same(plain, load(folder))
    assert "model.layers.4.* (1 tensors" in caplog.text
    rewrite(folder, lambda t: t.update({"model.layers.5.eh_proj.weight": torch.ones(32, 64)}))
    refused(folder, "unexpected tensors", "model.layers.5.eh_proj")


def test_other_prefixes_of_a_family(llama, monkeypatch):
    plain = load(llama)
    rewrite(llama, lambda t: t.update({f"language_{n}": t.pop(n) for n in list(t) if n.startswith("model.")}))
    refused(llama, "unexpected tensors: language_model.")
    monkeypatch.setattr(find_family("llama"), "RENAMED", {"language_model.": "model."}, raising=False)
    assert same(plain, load(llama))


def test_a_config_of_other_size(llama):
    checkpoints.edit_json(llama / "config.json", lambda c: c.update(num_hidden_layers=4))
    refused(llama, "4 layers", "missing tensors", "model.layers.3")
    checkpoints.edit_json(llama / "config.json", lambda c: c.update(num_hidden_layers=2))
    refused(llama, "unexpected tensors", "model.layers.2")


def test_wrong_shapes(llama):
    rewrite(llama, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(56, 32)}))
    refused(llama, "model.safetensors", "model.layers.0.mlp.down_proj.weight", "[56, 32]", "[32, 56]")


def test_a_bigger_vocabulary_than_the_embedding(llama):
    checkpoints.edit_json(llama / "config.json", lambda c: c.update(vocab_size=98))
    refused(llama, "weight", "[97, 32]", "[98, 32]")


@pytest.mark.parametrize("dtype,name", [(torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_wrong_dtypes(dtype, name, llama):
    rewrite(llama, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    refused(llama, "model.safetensors", "model.norm.weight", name, "BF16")


# ------------------------------------------------------------------------------------------------------ wrong files


def test_no_weights(llama):
    (llama / "model.safetensors").unlink()
    refused(llama, "neither model.safetensors nor")
    (llama / "pytorch_model.bin").write_bytes(b"x")
    refused(llama, "pytorch_model.bin", "convert")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_truncated_files(keep, llama):
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:keep])
    refused(llama, "model.safetensors", "truncated")


def test_truncation_names_the_tensor(llama):
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:-1])
    last = max(read_header_offsets(data).items(), key=lambda item: item[1])[0]
    refused(llama, f"tensor '{last}'")


def read_header_offsets(data):
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    return {name: e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"}


def test_oversized_files(llama):
    with (llama / "model.safetensors").open("ab") as f:
        f.write(b"extra")
    refused(llama, "model.safetensors", "5 bytes longer")


def forge(file, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize(
    "header,words",
    [
        (b"{]", ["header is not valid JSON"]),
        (b"\xff\xff", ["header is not valid JSON"]),
        (b"[]", ["not a JSON object"]),
        ({"a": 3}, ["tensor 'a'", "damaged"]),
        ({"a": {"dtype": "F32", "shape": [1]}}, ["tensor 'a'", "damaged"]),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, ["tensor 'a'", "damaged"]),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, ["tensor 'a'", "damaged"]),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, ["tensor 'a'", "not a whole number"]),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, ["tensor 'a'", "not a whole number"]),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, ["tensor 'a'", "needs 4 bytes"]),
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, ["tensor 'a'", "needs"]),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, ["tensor 'a'", "needs 8 bytes"]),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, ["tensor 'a'", "dtype"]),
        ({"a": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}}, ["tensor 'a'", "truncated"]),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, ["tensor 'a'", "gap"]),
        ({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, ["tensor 'b'", "overlap"]),
    ],
    ids=str,
)
def test_forged_headers(header, words, tmp_path):
    forge(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ConfigError) as e:
        read_header(tmp_path / "model.safetensors")
    for word in ["model.safetensors", *words]:
        assert word in str(e.value), str(e.value)


@pytest.mark.parametrize("length", [2**63, 2**40, 100_000_001, 3])
def test_forged_header_lengths(length, tmp_path):
    forge(tmp_path / "model.safetensors", {}, bytes(8), length)
    with pytest.raises(ConfigError, match="truncated|valid JSON"):
        read_header(tmp_path / "model.safetensors")


def test_an_empty_checkpoint(llama):
    forge(llama / "model.safetensors", {})
    refused(llama, "missing tensors")


# ------------------------------------------------------------------------------------------------------ wrong index


def edit_map(folder, edit):
    checkpoints.edit_json(folder / loader.INDEX, lambda index: edit(index["weight_map"]))


def test_a_missing_shard(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    refused(sharded, victim.name, "missing", "model.")


def test_one_file_saved_over_shards(sharded):
    """transformers removes the shards and leaves their index."""
    checkpoints.write(sharded, "qwen2", seed=5)
    assert (sharded / loader.INDEX).exists() and len(list(sharded.glob("*.safetensors"))) == 1
    assert {t.file.name for t in loader.read_headers(sharded)} == {"model.safetensors"}


def test_shards_saved_over_one_file(llama, caplog):
    """transformers leaves the file."""
    caplog.set_level("WARNING", logger="kvasir")
    checkpoints.write(llama, "llama", seed=5, shards=True)
    assert (llama / "model.safetensors").exists()
    assert (
        "model.safetensors" not in {t.file.name for t in loader.read_headers(llama)}
        and "both model.safetensors and shards" in caplog.text
    )


@pytest.mark.parametrize(
    "target", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "a\\b", "x\0y"]
)
def test_an_index_may_not_leave_its_folder(target, sharded):
    (sharded.parent / "secret.safetensors").write_bytes(b"")
    edit_map(sharded, lambda m: m.update({"model.norm.weight": target}))
    refused(sharded, "index.json", "plain file name")


def test_an_index_that_is_wrong_about_a_shard(sharded):
    names = sorted(p.name for p in sharded.glob("*.safetensors"))
    edit_map(sharded, lambda m: m.update({"model.norm.weight": next(n for n in names if n != m["model.norm.weight"])}))
    refused(sharded, "does not hold tensor 'model.norm.weight'")


def test_a_tensor_in_two_shards(sharded):
    names = sorted(p.name for p in sharded.glob("*.safetensors"))
    first, second = load_file(sharded / names[0]), load_file(sharded / names[1])
    name = next(iter(first))
    save_file({**second, name: first[name]}, sharded / names[1])
    refused(sharded, f"'{name}' is in two shards", names[0], names[1])


@pytest.mark.parametrize(
    "text,words",
    [
        ("{", "valid JSON"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": ["a"]}', "weight_map"),
    ],
)
def test_bad_indexes(text, words, sharded):
    (sharded / loader.INDEX).write_text(text)
    refused(sharded, "index.json", words)


def test_nothing_is_allocated_before_the_checkpoint_is_found_good(llama, monkeypatch):
    """A config that asks for a huge model fails on its shapes, not on memory."""
    checkpoints.edit_json(llama / "config.json", lambda c: c.update(vocab_size=2_000_000_000))
    refused(llama, "weight", "2000000000")
