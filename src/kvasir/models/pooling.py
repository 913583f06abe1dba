"""The work that a checkpoint was made for: to generate, to embed or to score. Read from its folder; needs no torch.

Embedding models are folders of sentence-transformers (``modules.json``, ``1_Pooling/config.json``, ``2_Normalize``,
``config_sentence_transformers.json``) or checkpoints without a head (``Qwen3Model``). Rerankers have a head for one
class (``Qwen3ForSequenceClassification``), or score by the logits of two tokens: with a ``LogitScore`` module,
``classifier_from_token`` in config.json (vLLM's name), or as the family's own rerankers do (`Reranker`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import read_json
from kvasir.models.families import find_family
from kvasir.models.reranker import Reranker
from kvasir.plain_files import read_text
from kvasir.types import Pooling, PoolRows

MODULES, PROMPTS, SENTENCES = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
# Pooling modes of sentence-transformers that are served; others are refused by name.
MODES: dict[str, PoolRows] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# The same in the spelling of newer folders: "pooling_mode": "lasttoken".
SHORT_MODES: dict[str, PoolRows] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
LABELS_END, BARE_END = "ForSequenceClassification", "Model"


def read_pooling(path: Path, config: dict[str, Any], task: str = "auto", name: str = "") -> Pooling | None:
    """The pooling of the checkpoint in ``path``; None: it generates.

    ``task``: ``generate``, ``embed`` or ``score`` to decide it, or ``auto``. ``name``: the model as the user named it;
    a reranker that nothing in its folder marks is known by its name. Raises ConfigError.
    """
    modules = _modules(path)
    named = config.get("architectures")  # what is wrong with it, and with other fields, the family says
    architectures = [a for a in named if isinstance(a, str)] if isinstance(named, list) else []
    has_labels = any(a.endswith(LABELS_END) for a in architectures)
    is_bare = bool(architectures) and all(a.endswith(BARE_END) for a in architectures)
    reranker: Reranker | None = getattr(find_family(config["model_type"]), "RERANKER", None)
    by_tokens = "LogitScore" in modules or "classifier_from_token" in config
    if task == "auto":
        if has_labels or by_tokens:
            task = "score"
        elif is_bare or "Pooling" in modules:
            task = "embed"
        elif reranker is not None and "rerank" in f"{name}/{path.name}".lower():
            task = "score"
        else:
            task = "generate"
    if task == "generate":
        if has_labels or is_bare:
            raise ConfigError(
                f"config.json: architectures {', '.join(architectures)} has no head for tokens, so it cannot generate. "
                "Leave out --task generate."
            )
        return None
    if config.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention: only models with causal attention are served")
    if task == "embed":
        if has_labels:
            raise ConfigError("the checkpoint has a head for classes and was made to score. Leave out --task embed.")
        return _embedding(path, config, modules)
    if is_bare:
        raise ConfigError("the checkpoint has no head, so it cannot score. Leave out --task score to embed with it.")
    template = None if reranker is None else reranker.template
    if has_labels:
        _check_labels(config)
        return Pooling(task="score", activation=_activated(config), labels=1, template=template)
    tokens = _tokens(path, config, modules, reranker)
    return Pooling(task="score", activation=True, tokens=tokens, template=template)


def _modules(path: Path) -> dict[str, str]:
    """Folder of each module of sentence-transformers, by class name. Raises ConfigError for one that is not served."""
    listed = _read_list(path / MODULES) if (path / MODULES).is_file() else []
    found: dict[str, str] = {}
    for module in listed:
        kind, folder = str(module.get("type", "")).rpartition(".")[2], module.get("path", "")
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise ConfigError(
                f"{path / MODULES}: a module of type '{kind}' is not served; served are Transformer, Pooling, "
                "Normalize and LogitScore"
            )
        if not isinstance(folder, str) or "/" in folder or "\\" in folder or ".." in folder:
            raise ConfigError(f"{path / MODULES}: the path {folder!r} is not a plain folder name")
        found[kind] = folder
    return found


def _read_list(file: Path) -> list[dict[str, Any]]:
    import json

    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from e
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ConfigError(f"{file}: expected a list of modules")
    return value


def _embedding(path: Path, config: dict[str, Any], modules: dict[str, str]) -> Pooling:
    """Pooling as the folder says; without modules, the last row scaled to length 1, as vLLM takes it."""
    rows: PoolRows = "last"
    if "Pooling" in modules:
        rows = _rows(path / modules["Pooling"] / "config.json")
    sentences = read_json(path / SENTENCES) if (path / SENTENCES).is_file() else {}
    if sentences.get("do_lower_case"):
        raise ConfigError(f"{path / SENTENCES}: do_lower_case is not served; lower the texts, and set it to false")
    prompts = read_json(path / PROMPTS) if (path / PROMPTS).is_file() else {}
    named, default = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise ConfigError(f"{path / PROMPTS}: prompts is not an object of names and texts")
    if default is not None and default not in named:
        raise ConfigError(f"{path / PROMPTS}: default_prompt_name is {default!r}, which is none of the prompts")
    return Pooling(
        task="embed",
        rows=rows,
        activation="Normalize" in modules or not modules,
        width=config.get("hidden_size", 0),
        prompts=named,
        default_prompt=default,
    )


def _rows(file: Path) -> PoolRows:
    """The pooled rows of a Pooling module. Raises ConfigError for other modes and for several at once."""
    pooling = read_json(file)
    if pooling.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt is false; prompts that are left out of the mean are not served")
    if (short := pooling.get("pooling_mode")) is not None:
        if short in SHORT_MODES:
            return SHORT_MODES[short]
        modes = [str(short)]
    else:
        modes = [mode for mode, on in pooling.items() if mode.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ConfigError(
            f"{file}: the pooling {' with '.join(modes) or 'none'} is not served; served is one of {', '.join(MODES)}"
        )
    return MODES[modes[0]]


def _check_labels(config: dict[str, Any]) -> None:
    """Raise ConfigError unless the head has a single label, as transformers counts them."""
    names = config.get("id2label")
    count = len(names) if isinstance(names, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ConfigError(
            f"config.json: the head has {count} labels; rerankers with one label are served, classifiers are not"
        )


def _activated(config: dict[str, Any]) -> bool:
    """Whether a score goes through a sigmoid: unless the config of the cross-encoder names the identity."""
    own = config.get("sentence_transformers")
    name = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    if name is None:
        return True
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ConfigError(f"config.json: the activation {name} of the score is not served; Sigmoid and Identity are")
    return kind == "Sigmoid"


def _tokens(
    path: Path, config: dict[str, Any], modules: dict[str, str], reranker: Reranker | None
) -> tuple[int | None, int]:
    """Ids of the tokens for no and for yes. Raises ConfigError."""
    if "LogitScore" in modules:
        file = path / modules["LogitScore"] / "config.json"
        module = read_json(file)
        no, yes = module.get("false_token_id"), module.get("true_token_id")
        if type(yes) is not int or type(no) is not int and no is not None:
            raise ConfigError(f"{file}: true_token_id and false_token_id must be token ids")
        return no, yes
    words = config.get("classifier_from_token") or (reranker and reranker.tokens)
    if not words or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            "the checkpoint does not say which tokens make the score. Add to config.json, for example, "
            '"classifier_from_token": ["no", "yes"]'
        )
    from kvasir.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    ids = [tokenizer.token_to_id(word) for word in words]
    if None in ids:
        raise ConfigError(f"the tokenizer has no token '{words[ids.index(None)]}', whose logit would make the score")
    return ids[0], ids[1]
