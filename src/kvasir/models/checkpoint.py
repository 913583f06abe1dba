"""Model folders, hub ids and the embedded model, and the reading of their configs. Needs no torch.

Checkpoints that are not served (quantised weights, adapters, multimodal parts) are refused here by name, before any
weight is read.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, nearest
from kvasir.logs import log
from kvasir.models.families import find_family

# Files to download: no pickles, no code, and no second copy of the weights in another layout.
WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
UNWANTED = ["*/*", "consolidated*"]
# Names of the models that "embedded" stands for; the first that exists is taken.
DEFAULTS = ("base", "nano")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the model's folder. Raises ConfigError.

    ``model``: a path, the name of a model in the package, a hub id (downloaded, or from the hub's cache), or "" or
    "embedded" for the package's default model. If a bare name fits both a model in the package and a folder here, the
    folder is taken if it holds a config.json, with a warning; ``./name`` always means the folder.
    """
    if not model:
        return embedded()
    path = Path(model).expanduser()
    if model == "embedded" or model in shipped():
        ours = embedded() if model == "embedded" else _assets() / model
        if not (path / "config.json").is_file():
            return ours
        _warn_of_folder(model, str(ours))
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"model '{model}' is a file. Give the folder that holds config.json and *.safetensors"
            + (" (GGUF is not served)" if path.suffix == ".gguf" else "")
        )
    if not HUB_ID.fullmatch(model) or ".." in model or model.startswith("."):
        raise ConfigError(f"model '{model}': no such folder, and it is not a hub id (owner/name) either")
    return _download(model, revision)


@functools.cache  # one warning per process, although names are resolved in several places
def _warn_of_folder(name: str, ours: str) -> None:
    log.warning("model '%s' is the folder ./%s here, not the model in the package (%s)", name, name, ours)


def _assets() -> Path:
    return Path(str(importlib.resources.files("kvasir"))) / "assets"


def shipped() -> list[str]:
    """Names of the models in the package, which may be given wherever a model is asked for."""
    return sorted(file.parent.name for file in _assets().glob("*/config.json"))


def embedded() -> Path:
    """The folder of the model that "" means: the strongest one in the package.
    Raises ConfigError when there is none."""
    for name in DEFAULTS:
        if (_assets() / name / "config.json").is_file():
            return _assets() / name
    raise ConfigError(f"this installation has no embedded model in {_assets()}. Name a model folder or a hub id.")


def _download(model: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    # Specific errors first, because the hub's errors are subclasses of one another.
    reasons: list[tuple[type[Exception], str]] = [
        (errors.GatedRepoError, "it is gated: accept its terms on the hub and log in with `hf auth login`"),
        (
            errors.RepositoryNotFoundError,
            "no such folder here, and no such public model on the hub (private ones need `hf auth login`)",
        ),
        (errors.RevisionNotFoundError, f"it has no revision '{revision}'"),
        (
            errors.LocalEntryNotFoundError,
            "no such folder here, the hub cannot be reached, and its cache does not hold the model",
        ),
        (errors.HFValidationError, "no such folder here, and it is not a valid hub id"),
        (errors.HfHubHTTPError, "the hub answered with an error"),
        (OSError, "it could not be downloaded"),
    ]
    try:
        return Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        )
    except tuple(kind for kind, _ in reasons) as e:
        why = next(text for kind, text in reasons if isinstance(e, kind))
        names = shipped() if "/" not in model else []
        if names:
            why += f"; the package holds {', '.join(names)}.{nearest(model, names)}"
        details = str(e).strip().splitlines()[0] if str(e).strip() else "no details"
        raise ConfigError(f"model '{model}': {why} ({type(e).__name__}: {details})") from e


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json of a model folder.
    Raises ConfigError that names the file or field, also for models that are not served."""
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"{path} holds an adapter (adapter_config.json) and not a model. Serve it with its base model: "
                f"--enable-lora --lora-modules NAME={path}, or merge it: kvasir convert merge_lora:adapter={path}"
            )
        found = (
            "it is empty"
            if not any(path.iterdir())
            else f"it holds {', '.join(sorted(p.name for p in path.iterdir())[:5])}"
        )
        raise ConfigError(f"{path} has no config.json ({found}). Give a folder in HF format.")
    config = read_json(path / "config.json")
    refuse_unserved(config)
    return config


def refuse_unserved(config: dict[str, Any]) -> None:
    """Raise ConfigError for configs that no family serves: quantised weights, multimodal parts, unknown families."""
    model_type = config.get("model_type")
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"config.json: quantization_config (quant_method '{method}') is not served. Use the unquantised checkpoint."
        )
    parts = sorted(k for k, v in config.items() if k.endswith("_config") and isinstance(v, dict) and v)
    if parts:
        raise ConfigError(
            f"config.json: model_type '{model_type}' is made of parts ({', '.join(parts)}); multimodal and composite "
            "models are not served. Use a text-only checkpoint."
        )
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            "config.json: model_type is missing" + ("" if config.get("architectures") else ", and so is architectures")
        )
    find_family(model_type)


def end_ids(config: dict[str, Any], file: str) -> list[int]:
    """The ids in ``eos_token_id``, which may be absent, one id or a list. Raises ConfigError that names the file."""
    given = config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{file}: eos_token_id is {given!r}, expected a token id or a list of them")
    return ids


def read_generation_config(path: Path) -> dict[str, Any]:
    """Read generation_config.json, or {} when there is none. Raises ConfigError when it is not a JSON object."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}
