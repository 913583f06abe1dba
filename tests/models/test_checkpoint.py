"""Finding a model and reading its config: errors name their cause, and unserved models are refused, never ignored."""

import json
import shlex

import huggingface_hub
import pytest
from huggingface_hub import errors

from kvasir.errors import ConfigError
from kvasir.models import advice, checkpoint

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def folder(tmp_path, config=None, **files):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


def test_a_good_config(tmp_path):
    assert checkpoint.read_config(folder(tmp_path, LLAMA)) == LLAMA


@pytest.mark.parametrize(
    "config,words",
    [
        ("{", ["config.json", "not valid JSON"]),
        ("", ["config.json", "not valid JSON"]),
        ("[" * 100_000, ["config.json", "not valid JSON"]),
        ("[1]", ["config.json", "object", "list"]),
        ({}, ["model_type is missing", "architectures"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["model_type is missing"]),
        ({"model_type": 3}, ["model_type is missing"]),
        ({"model_type": "gpt2"}, ["'gpt2' is not served", "llama", "gemma3_text"]),
        ({"model_type": "qwen3moe"}, ["Did you mean 'qwen3_moe'"]),
        (
            {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
            ["quantization_config", "'bitsandbytes'", "not served"],
        ),
        ({**LLAMA, "quantization_config": {"load_in_4bit": True}}, ["quantization_config", "dequantize()"]),
        ({**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}}, ["'compressed-tensors'"]),
        (
            {**LLAMA, "text_config": LLAMA, "vision_config": {"x": 1}},
            ["'llama'", "text_config, vision_config", "parts"],
        ),
        ({"model_type": "gemma3", "vision_config": {"x": 1}}, ["'gemma3'", "vision_config", "parts"]),
        (
            {"model_type": "gemma3", "text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
            ["quantization_config", "'bitsandbytes'", "not served"],
        ),
        ({**LLAMA, "audio_config": {"hidden_size": 8}}, ["audio_config"]),
        ({"model_type": "llava", "text_config": LLAMA, "vision_config": {"x": 1}}, ["'llava'", "not served"]),
    ],
    ids=str,
)
def test_bad_configs(config, words, tmp_path):
    with pytest.raises(ConfigError) as e:
        checkpoint.read_config(folder(tmp_path, config))
    for word in words:
        assert word in str(e.value), str(e.value)


@pytest.mark.parametrize("model_type", ["mixtral2", "qwen4", "gemma5_text", "lama"])
def test_another_architecture_is_never_suggested(model_type, tmp_path):
    with pytest.raises(ConfigError, match="not served") as e:
        checkpoint.read_config(folder(tmp_path, {"model_type": model_type}))
    assert "Did you mean" not in str(e.value)


def test_the_text_of_a_multimodal_config(tmp_path):
    """The whole says what holds for all parts; the text says the rest."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": 1, "bos_token_id": 2, "dtype": "float32"}
    whole = {"eos_token_id": [1, 106], "tie_word_embeddings": False, "dtype": "bfloat16", "vision_config": {"x": 1}}
    found = checkpoint.read_config(folder(tmp_path, {"model_type": "gemma3", "text_config": text, **whole}))
    assert found == {
        **text,
        "eos_token_id": [1, 106],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "model_type": "gemma3",
        "text_model_type": "gemma3_text",
    }


def test_an_empty_quantization_config_says_nothing(tmp_path):
    assert checkpoint.read_config(folder(tmp_path, {**LLAMA, "quantization_config": None, "vision_config": None}))


def test_a_config_that_is_not_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match="config.json is not text in UTF-8"):
        checkpoint.read_config(tmp_path)


@pytest.mark.parametrize(
    "files,words",
    [
        ({}, ["no config.json", "empty"]),
        ({"README__md": "hello"}, ["no config.json", "README.md"]),
        (
            {"adapter_config__json": "{}"},
            ["adapter_config.json", "serve BASE --enable-lora", "merge_lora:adapter=", "BASE merged"],
        ),
        ({"adapter_config__json": "[]"}, ["serve BASE --enable-lora"]),
        (
            {"adapter_config__json": '{"base_model_name_or_path": "owner/base model"}'},
            ["kvasir serve 'owner/base model' --enable-lora", "'owner/base model' merged"],
        ),
        ({"w__gguf": "x"}, ["Name the GGUF file", "kvasir serve", "w.gguf"]),
        ({"params__json": "{}"}, ["params.json", "HF format"]),
    ],
    ids=str,
)
def test_no_config(files, words, tmp_path):
    with pytest.raises(ConfigError) as e:
        checkpoint.read_config(folder(tmp_path, None, **files))
    for word in words:
        assert word in str(e.value), str(e.value)


def test_the_folder_below_is_named(tmp_path):
    (tmp_path / "hf").mkdir()
    folder(tmp_path / "hf", {})
    with pytest.raises(ConfigError, match=f"kvasir serve {tmp_path / 'hf'}"):
        checkpoint.read_config(tmp_path)


@pytest.mark.parametrize("line", ["from_gguf", "to_safetensors"])
def test_commands_can_be_pasted_into_a_shell(tmp_path, line):
    """Whatever the path is called, the shell sees one word, and Python a program without syntax errors."""
    place = tmp_path / "it's; a (path)"
    command = getattr(advice, line)(place).partition(" (pip")[0]
    python, flag, code = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    compile(code, "command", "exec")
    if line != "from_gguf":
        assert repr(str(place)) in code


def test_generation_config(tmp_path):
    assert checkpoint.read_generation_config(tmp_path) == {}
    folder(tmp_path, None, generation_config__json='{"temperature": 0.6}')
    assert checkpoint.read_generation_config(tmp_path) == {"temperature": 0.6}
    folder(tmp_path, None, generation_config__json="nope")
    with pytest.raises(ConfigError, match="generation_config.json is not valid JSON"):
        checkpoint.read_generation_config(tmp_path)


# ------------------------------------------------------------------------------------------------------------ resolve


def test_a_folder_is_itself(tmp_path):
    assert checkpoint.resolve(str(tmp_path)) == tmp_path


def test_files_and_bad_paths(tmp_path):
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file|pip install gguf"):
        checkpoint.resolve(str(tmp_path / "model.gguf"))
    folder(tmp_path, {}, model__safetensors="x")
    with pytest.raises(ConfigError, match=f"is a file. Give its folder: kvasir serve {tmp_path}$"):
        checkpoint.resolve(str(tmp_path / "model.safetensors"))
    for name in (
        str(tmp_path / "nothing"),
        "./nothing",
        "../up/there",
        "a/b/c",
        "who ami/model",
        "owner/..",
        ".hidden",
    ):
        with pytest.raises(ConfigError, match="no such folder"):
            checkpoint.resolve(name)


def test_hub_ids_download_only_what_is_needed(monkeypatch, tmp_path):
    from fnmatch import fnmatch

    seen = {}

    def download(name, **kwargs):
        seen.update(name=name, **kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint.resolve("owner/name", "v1") == tmp_path
    assert seen["name"] == "owner/name" and seen["revision"] == "v1"

    def taken(file):
        return any(fnmatch(file, p) for p in seen["allow_patterns"]) and not any(
            fnmatch(file, p) for p in seen["ignore_patterns"]
        )

    assert all(
        map(
            taken,
            [
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "chat_template.jinja",
                "model.safetensors",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
        )
    )
    assert not any(
        map(
            taken,
            [
                "pytorch_model.bin",
                "modeling_custom.py",
                "consolidated.safetensors",
                "original/consolidated.00.pth",
                "onnx/model.safetensors",
                "README.md",
            ],
        )
    )


class Response:
    """The parts of an HTTP response that the hub's errors use."""

    headers: dict = {}
    request = None
    status_code = 404


@pytest.mark.parametrize(
    "error,words",
    [
        (errors.RepositoryNotFoundError("404", response=Response()), ["no such public model"]),
        (errors.GatedRepoError("403", response=Response()), ["gated"]),
        (errors.RevisionNotFoundError("404", response=Response()), ["no revision 'v9'"]),
        (errors.LocalEntryNotFoundError("offline"), ["cannot be reached"]),
        (errors.HFValidationError("bad"), ["not a valid hub id"]),
        (ConnectionError("refused"), ["could not be downloaded", "refused"]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_hub_errors(error, words, monkeypatch):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError) as e:
        checkpoint.resolve("owner/name", "v9")
    for word in ["owner/name", *words]:
        assert word in str(e.value), str(e.value)


def test_the_embedded_model(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint.importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="no embedded model"):
        checkpoint.resolve("")
    (tmp_path / "assets" / "base").mkdir(parents=True)
    (tmp_path / "assets" / "base" / "config.json").write_text("{}")
    for name in ("", "embedded", "base"):
        assert checkpoint.resolve(name) == tmp_path / "assets" / "base"


def test_a_bare_name_means_the_package_unless_a_folder_here_is_a_model(monkeypatch, tmp_path, caplog):
    """A folder named ``nano`` in the working folder must not hide the shipped model."""
    checkpoint._warn_of_folder.cache_clear()
    shipped = checkpoint.resolve("nano")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()
    assert checkpoint.resolve("nano") == shipped and not caplog.records
    assert checkpoint.resolve("./nano").samefile("nano") and checkpoint.resolve("nano/").samefile("nano")
    (tmp_path / "nano" / "config.json").write_text("{}")
    for _ in range(2):
        assert checkpoint.resolve("nano").samefile("nano")
    [said] = caplog.messages
    assert "the folder ./nano here" in said and str(shipped) in said
    assert checkpoint.resolve("./nano").samefile("nano") and len(caplog.messages) == 1, "who writes a path knows"
    (tmp_path / "embedded").mkdir()
    assert checkpoint.resolve("embedded") == checkpoint.resolve("")
