"""A GGUF file as a model folder: config.json, the tokenizer and the chat template of its metadata, and a link to it.

The folder lies in the user's cache and is named after the file, so a second start reads it at once. Everything that
takes a model's folder then takes a GGUF file. Metadata that would change the result and is not served is refused by
name. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.models import advice
from kvasir.models.gguf_file import BLOCKS, FREQUENCIES, PLAIN_TYPES, GGUFFile
from kvasir.plain_files import refuse_special

LINK = "model.gguf"
VERSION = 1  # of what is written; part of a folder's name
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# Fields after the architecture's name that are read, or that change nothing here.
KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size",
}  # fmt: skip
# Llama 3's rule (its model card): GGUF holds the factors that it gives, and not its numbers.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
CLOSE = 1e-3  # relative difference of such factors: they are rounded to fp32


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or a folder with one and nothing else to serve."""
    return path.suffix == ".gguf" and path.exists() and not path.is_dir() or file_in(path) is not None


def file_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that is no model folder itself. Raises ConfigError where there are several."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1 and not SHARD.search(files[0].stem):
        raise ConfigError(f"{folder} holds several GGUF files: name one, e.g. kvasir serve {files[0]}")
    return files[0] if files else None


def as_folder(path: Path) -> Path:
    """The model folder that stands for a GGUF file, or for a folder with one. Raises ConfigError."""
    file = (file_in(path) or path).resolve()
    refuse_special(file)
    about = file.stat()
    key = f"{VERSION} {file} {about.st_size} {about.st_mtime_ns}"
    target = _cache() / f"{file.stem[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    from kvasir.models.gguf_tokenizer import write_tokenizer  # here, because a start without such a file needs none

    source = GGUFFile(file)
    config = config_of(source)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix="making-"))
    try:
        write_tokenizer(source, made)
        (made / LINK).symlink_to(file)
        (made / "config.json").write_text(json.dumps(config, indent=1))
        try:
            made.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(made, ignore_errors=True)
            if not (target / "config.json").is_file():
                raise
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return target


def _cache() -> Path:
    """Folder of such folders; where it cannot be written, one of temporary files."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "gguf"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    other = Path(tempfile.gettempdir()) / f"kvasir-gguf-{os.getuid()}"
    other.mkdir(mode=0o700, exist_ok=True)
    if other.stat().st_uid != os.getuid():
        raise ConfigError(f"{other} belongs to somebody else: set XDG_CACHE_HOME to a folder that can be written")
    return other


def config_of(source: GGUFFile) -> dict[str, Any]:
    """The fields of config.json that the metadata stands for. Raises ConfigError for what is not served."""
    name = source.field("general.architecture")
    if name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        _refuse(source, f"architecture '{name}' is not served from GGUF; served are {served}", convert=True)
    if (count := source.field("split.count", 1)) > 1:
        _refuse(source, f"is one of {count} parts. Merge them: llama-gguf-split --merge {source.file} merged.gguf")
    for field in source.names(f"{name}."):
        if field.removeprefix(f"{name}.") not in KNOWN and source.field(field):
            _refuse(source, f"{field} {source.field(field)!r} is not served", convert=True)

    def given(field: str, default: Any = None) -> Any:
        found = source.field(f"{name}.{field}", default)
        if found is None:
            _refuse(source, f"{name}.{field} is missing")
        if isinstance(found, list):  # by layer
            if len(set(found)) > 1:
                _refuse(source, f"{name}.{field} differs between layers, which is not served", convert=True)
            found = found[0]
        return found

    tensors = {tensor: (kind, shape) for tensor, kind, shape, *_ in source.tensors()}
    heads, hidden = given("attention.head_count"), given("embedding_length")
    head_dim = given("attention.key_length", hidden // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if given(field, head_dim) != head_dim:
            _refuse(source, f"{name}.{field} {given(field)} with heads of {head_dim} is not served", convert=True)
    kv_heads = given("attention.head_count_kv", heads)
    config = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "dtype": "bfloat16",
        "vocab_size": tensors["model.embed_tokens.weight"][1][0] if "model.embed_tokens.weight" in tensors else 0,
        "hidden_size": hidden,
        "intermediate_size": given("feed_forward_length"),
        "num_hidden_layers": given("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": given("context_length"),
        "rms_norm_eps": given("attention.layer_norm_rms_epsilon"),
        "rope_theta": given("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensors,
        "quantization_config": _types(source, tensors, name == "llama", heads, kv_heads),
    }
    if (scaling := _scaling(source, given, config, tensors)) is not None:
        config["rope_scaling"] = scaling
    for role in ("bos", "eos"):
        if (token := source.field(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role}_token_id"] = token
    return config


def _types(
    source: GGUFFile, tensors: dict[str, tuple[str, tuple[int, ...]]], paired: bool, heads: int, kv_heads: int
) -> dict[str, Any]:
    """The ``quantization_config`` that the reader of GGUF takes."""
    types = {}
    for name, (kind, shape) in tensors.items():
        if kind in PLAIN_TYPES:
            continue
        if kind not in BLOCKS or len(shape) != 2:
            served = ", ".join((*BLOCKS, *PLAIN_TYPES))
            _refuse(source, f"tensor '{name}' is stored as {kind}; served are {served}", convert=True)
        types[name.removesuffix(".weight")] = kind
    return {"quant_method": "gguf", "types": types, "paired": {"q_proj": heads, "k_proj": kv_heads} if paired else {}}


def _scaling(source: GGUFFile, given: Any, config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any] | None:
    kind = given("rope.scaling.type", "none")
    if FREQUENCIES in tensors:
        if kind not in ("none", "llama3"):
            _refuse(source, f"RoPE scaled by {kind} and by {FREQUENCIES} is not served", convert=True)
        return _llama3(source, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        _refuse(source, f"RoPE scaling '{kind}' is not served", convert=True)
    found = {"rope_type": kind, "factor": given("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = given("rope.scaling.original_context_length")
    # Kvasir multiplies the context by the factor, as vLLM does; a GGUF file's length has been multiplied.
    config["max_position_embeddings"] = int(config["max_position_embeddings"] / (found["factor"] or 1))
    return found


def _llama3(source: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters of Llama 3's rule that gives the file's factors. Raises ConfigError where none does."""
    import numpy as np

    factors = np.asarray(source.array(FREQUENCIES), np.float64)
    dim, factor = config["head_dim"], float(factors.max())
    if factor == 1:
        return None
    plain = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    kept = np.clip((ORIGINAL * plain / (2 * np.pi) - LOW) / (HIGH - LOW), 0, 1)
    wanted = 1 / ((1 - kept) / factor + kept)
    if wanted.shape != factors.shape or not np.allclose(wanted, factors, rtol=CLOSE):
        _refuse(source, f"{FREQUENCIES} holds factors that Llama 3's rule does not give", convert=True)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


def _refuse(source: GGUFFile, what: str, convert: bool = False) -> None:
    instead = f". Name the checkpoint that it was made from, or convert it back: {advice.from_gguf(source.file)}"
    raise ConfigError(f"{source.file}: {what}{instead if convert else ''}")
