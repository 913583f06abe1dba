"""Model folders, hub ids and the embedded model, and the reading of their configs. Needs no torch.

Checkpoints that are not served (quantised weights, adapters, unknown families) are refused here by name, before any
weight is read.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, from_lab, nearest
from kvasir.logs import log
from kvasir.models import advice
from kvasir.models.families import find_family, text_of
from kvasir.models.gguf_folder import as_folder, is_gguf
from kvasir.models.quantisation import reader_of
from kvasir.plain_files import read_text, refuse_special

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
    "modules.json",  # of sentence-transformers, whose modules have folders: 1_Pooling
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "kvasir.json",  # see SIDECAR
    "hf_quant_config.json",  # see MODELOPT
]
# Older files of NVIDIA's Model Optimizer say in it how they are quantised.
MODELOPT = "hf_quant_config.json"
# The sidecar: facts of a model that only kvasir uses, how it drafts (`kind`), the id of its mask, its stride.
SIDECAR = "kvasir.json"
UNWANTED = ["[!0-9]*/*", "consolidated*"]
# The model that "embedded" stands for.
DEFAULT = "base"
# Entry points of the models in installed packages: the name of a model, and the package whose folder holds it.
PACKAGED = "kvasir.models.packaged"
# Models of kvasir-lab, which is named where it is missing.
OF_LAB = ("nano",)
# A name that may be that of a model in a package.
NAME = re.compile(r"[\w-]+")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the model's folder. Raises ConfigError.

    ``model``: a path, a GGUF file or a folder with one (``gguf_folder``), the name of a model in the package, a hub id
    (downloaded, or from the hub's cache), or "" or "embedded" for the package's default model. If a bare name fits both
    a model in the package and a folder here, the folder is taken if it holds a config.json, with a warning; ``./name``
    always means the folder.
    """
    if not model:
        return embedded()
    path = Path(model).expanduser()
    if is_gguf(path):
        return as_folder(path)
    ours = embedded() if model == "embedded" else _packaged(model)
    if ours is not None:
        if not (path / "config.json").is_file():
            return ours
        _warn_of_folder(model, str(ours))
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model '{model}' is a file. {_instead(path)}")
    if not HUB_ID.fullmatch(model) or ".." in model or model.startswith("."):
        raise ConfigError(f"model '{model}': no such folder, and it is not a hub id (owner/name) either")
    if model in OF_LAB:
        raise ConfigError(from_lab(f"the model '{model}'"))
    return _download(model, revision)


def _instead(file: Path) -> str:
    """Say what to give instead of a file."""
    if (file.parent / "config.json").is_file():
        return f"Give its folder: kvasir serve {file.parent}"
    return "Give the folder that holds config.json and *.safetensors"


@functools.cache  # one warning per process, although names are resolved in several places
def _warn_of_folder(name: str, ours: str) -> None:
    log.warning("model '%s' is the folder ./%s here, not the model in the package (%s)", name, name, ours)


def _assets() -> Path:
    return Path(str(importlib.resources.files("kvasir"))) / "assets"


def shipped() -> list[str]:
    """Names of the models in this package and in installed ones, which may be given wherever a model is asked for."""
    ours = (file.parent.name for file in _assets().glob("*/config.json"))
    return sorted({*ours, *(e.name for e in importlib.metadata.entry_points(group=PACKAGED))})


def _packaged(name: str) -> Path | None:
    """The folder of the model ``name`` in this package, else in an installed one; None when none has it."""
    if not NAME.fullmatch(name):
        return None
    if (_assets() / name / "config.json").is_file():
        return _assets() / name
    for found in importlib.metadata.entry_points(group=PACKAGED, name=name):
        return Path(str(importlib.resources.files(found.module))) / name
    return None


def is_packaged(folder: Path) -> bool:
    """Whether a model's folder is one of those in a package."""
    ours = _packaged(folder.name)
    return ours is not None and folder.resolve() == ours.resolve()


def embedded() -> Path:
    """The folder of the model that "" means. Raises ConfigError when the package lacks it."""
    folder = _assets() / DEFAULT
    if (folder / "config.json").is_file():
        return folder
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
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(
    path: Path, as_served: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
) -> dict[str, Any]:
    """Read config.json of a model folder; of a multimodal model, the config of its text (`families.text_of`).
    ``as_served`` rewrites another layout first. Raises ConfigError that names the file or field, also for models that
    are not served."""
    refuse_special(path)
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"{path} holds an adapter (adapter_config.json) and not a model. Serve it with its base model: "
                f"{advice.serve_adapter(path)}. Or merge it: {advice.merge_adapter(path)}"
            )
        found = (
            "it is empty"
            if not any(path.iterdir())
            else f"it holds {', '.join(sorted(p.name for p in path.iterdir())[:5])}"
        )
        raise ConfigError(f"{path} has no config.json ({found}). {_other_layout(path)}")
    config = read_json(path / "config.json")
    if (path / MODELOPT).is_file() and not config.get("quantization_config"):
        config["quantization_config"] = {"quant_method": "modelopt"} | read_json(path / MODELOPT)
    config = as_served(config)
    refuse_unserved(config)
    return text_of(config)


def _other_layout(path: Path) -> str:
    """Say what to do about a folder that is not in HF format."""
    if files := sorted(path.glob("*.gguf")):
        return f"Name the GGUF file itself: kvasir serve {files[0]}"
    if (path / "params.json").is_file():
        return "params.json is the layout of the model's makers: download the folder in HF format, named for that."
    if folders := sorted(file.parent.name for file in path.glob("*/config.json")):
        return f"Give the folder in HF format: kvasir serve {path / folders[0]}"
    return "Give a folder in HF format: config.json, tokenizer.json and *.safetensors."


def refuse_unserved(config: dict[str, Any]) -> None:
    """Raise ConfigError for configs that no family serves: weights quantised in a way that no reader knows, parts that
    are not text, unknown families."""
    model_type = config.get("model_type")
    reader_of(config)
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            "config.json: model_type is missing" + ("" if config.get("architectures") else ", and so is architectures")
        )
    if model_type == advice.DIFFUSION:
        raise ConfigError(f"config.json: model_type '{model_type}' is not served as it is. {advice.to_qwen3()}")
    find_family(model_type)
    text_of(config)


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
