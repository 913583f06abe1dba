"""vLLM's ``speculative_config`` as our drafters.

Speculation changes no token, so keys that only steer how vLLM drafts are accepted and named. A key that vLLM does not
have is refused, and so is one that asks for something else than drafts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvasir.errors import ConfigError, nearest

# Methods whose heads are not read.
HEADS = re.compile(r"mlp_speculator|dspark|hydra|extract_hidden_states|custom_class")
# Words in the name of a folder or repository that say what it holds, as vLLM looks for them, and the method.
NAMES = (("eagle3", "eagle3"), ("eagle-3", "eagle3"), ("eagle", "eagle"), ("medusa", "medusa"), ("dflash", "dflash"))
USED = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
# Keys that change how vLLM drafts, and no token.
NOTED = (
    "attention_backend",
    "code_revision",
    "disable_by_batch_size",
    "disable_eagle_block_drop",
    "disable_logprobs",
    "disable_mqa_scorer",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "enable_adaptive_verification",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "num_speculative_tokens_per_batch_size",
    "parallel_drafting",
    "quantization",
    "rejection_sample_method",
    "speculative_token_tree",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_min_token_prob",
    "tensor_parallel_size",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)
# Keys that ask for something else, with what to do instead.
REFUSED = {
    "revision": "download that revision and give its folder as the model",
    "synthetic_acceptance_rates": "to measure at a set acceptance use --drafter replay:accept=0.7",
    "synthetic_acceptance_length": "to measure at a set acceptance use --drafter replay:accept=0.7",
}


def speculation(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return our settings for vLLM's ``speculative_config``, and a line that says what they are and which keys change
    nothing. Heads that are not read leave the model without drafts, with the same tokens. Raises ConfigError for an
    unknown key or method."""
    given = _checked(config)
    count = given.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"vLLM's --speculative-config: num_speculative_tokens is {count!r}, expected at least 1")
    method = given.get("method") or _method_of(given.get("model"))
    drafter = _drafter(method, given, count)
    if drafter is None:
        return {}, (
            f"vLLM's --speculative-config changes no token here: draft heads ('{method}') are not read, and nothing is "
            "drafted. --drafter suffix drafts from the text so far."
        )
    options: dict[str, Any] = {"drafter": drafter} | ({} if count is None else {"max_draft_tokens": count})
    line = f"vLLM's --speculative-config is read as {' '.join(options_as_args(options))}."
    left = [key for key in given if key in NOTED]
    return options, line + (f" These of its keys change nothing here: {', '.join(left)}." if left else "")


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are given. Raises ConfigError for one that vLLM does not have, or that asks for something else."""
    given = {key: value for key, value in config.items() if value is not None}
    for key in given:
        if key in REFUSED:
            raise ConfigError(f"kvasir does not serve {key} of vLLM's --speculative-config: {REFUSED[key]}.")
        if key not in USED and key not in NOTED:
            known = (*USED, *NOTED, *REFUSED)
            raise ConfigError(f"vLLM's --speculative-config has no key '{key}'.{nearest(key, known)}")
    if given.get("rejection_sample_method") == "synthetic":
        raise ConfigError(
            "kvasir does not serve rejection_sample_method 'synthetic' of vLLM's --speculative-config: to measure at a "
            "set acceptance use --drafter replay:accept=0.7."
        )
    return given


def _method_of(model: Any) -> str | None:
    """The method that a model's name stands for, where none is given."""
    if not model:
        return None
    name = str(model).rstrip("/").rpartition("/")[2].lower()
    return next((method for word, method in NAMES if word in name), "draft_model")


def _drafter(method: Any, given: Mapping[str, Any], count: int | None) -> str | None:
    """The spec of our drafter; None for heads that are not read. Raises ConfigError for an unknown method."""
    model = given.get("model")
    depth = {} if count is None else {"max_depth": count}
    if method in ("ngram", "[ngram]", "ngram_gpu"):
        keys = {"prompt_lookup_max": "max_match", "prompt_lookup_min": "min_match"}
        return _spec("ngram", {ours: given[theirs] for theirs, ours in keys.items() if given.get(theirs)})
    if method == "suffix":
        return "suffix"
    if isinstance(method, str) and (method == "mtp" or method.endswith("_mtp")):
        return _spec("mtp", depth)  # vLLM's other names are those of families
    if method in ("eagle", "eagle3", "draft_model", "medusa", "dflash"):
        if not model:
            raise ConfigError(
                f"vLLM's --speculative-config with method {method!r} needs a model: a folder or a hub id. Without one, "
                "--drafter suffix drafts from the text so far."
            )
        if method == "draft_model":
            return _spec("draft_model", {"model": model} | depth)
        if method == "medusa":
            return _spec("medusa", {"model": model})
        name = "dflash" if method == "dflash" else "eagle"
        return _spec(name, {"model": model, "width": 1} | depth)  # vLLM drafts chains
    if isinstance(method, str) and HEADS.fullmatch(method):
        return None
    raise ConfigError(
        f"kvasir does not serve vLLM's --speculative-config with method {method!r}: use --drafter, e.g. --drafter "
        "suffix or --drafter draft_model:model=NAME."
    )


def _spec(name: str, options: Mapping[str, Any]) -> str:
    """A technique with its options, as one string."""
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def options_as_args(options: Mapping[str, Any]) -> Iterator[str]:
    """Settings as arguments of a command line."""
    for name, value in options.items():
        yield from (f"--{name.replace('_', '-')}", str(value))
