"""The flags of vLLM that kvasir has no setting for: accepted if they ask for what kvasir does anyway, else refused by
name.

So a start script written for vLLM either works unchanged, or the error says which flag is not served and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ConfigError

# Flags that ask for what kvasir does anyway.
SATISFIED = (
    "--enable-chunked-prefill",
    "--enable-auto-tool-choice",
    "--disable-log-requests",
    "--no-enable-log-requests",
    "--no-trust-remote-code",
    "--use-v2-block-manager",
    "--enable-prompt-tokens-details",
    "--disable-fastapi-docs",
    "--disable-uvicorn-access-log",
)

# Likewise for everything except a server, which has a setting for it.
SATISFIED_OFFLINE = ("--disable-log-stats",)

# Flags with the values that are accepted.
ONLY_AT = {
    ("--tensor-parallel-size", "-tp"): ("1",),
    ("--pipeline-parallel-size", "-pp"): ("1",),
    ("--api-server-count",): ("1",),
    ("--tokenizer-mode",): ("auto",),
    ("--config-format",): ("auto", "hf"),
    ("--model-impl",): ("auto",),
    ("--runner",): ("auto", "generate", "pooling"),  # found in the checkpoint; --task decides otherwise
}

# Likewise for everything except a server, which has a setting for it.
ONLY_AT_OFFLINE = {("--data-parallel-size", "-dp"): ("1",)}

_SPECULATION = "drafts are switched on with --drafter, e.g. --drafter suffix or --drafter draft_model:model=NAME"
_OFFLOAD = "KV and weights stay on the device; a preempted sequence is computed again later"
_TEXT = "only text models are served yet"
_DEVICES = "one device is served yet"
_PARALLEL = "--replicas N runs an engine on each GPU, and --cluster ADDRESS on those of other hosts"
_GRAPHS = "decode steps are captured as needed, without settings or compilation; --enforce-eager turns that off"
_GRAMMAR = "there is one grammar engine, for JSON schema, regex, choice and Lark; requests need no change"
_ROPE = "RoPE follows the checkpoint's config.json; edit its rope_scaling there"
_TLS = "put a TLS-terminating proxy in front"
_HUB = "the hub client decides this; set its own variables (HF_HOME, HF_TOKEN)"
_EMBED = "a checkpoint's own files say how it pools; --task embed or score makes another model do it"
_HTTP = "the HTTP side has no such switch"
_STEPS = "one step is launched ahead of the one being read; --overlap and --no-overlap switch that"
_CPU = "use --cpu-cache-bytes for the pool on a CPU, and --gpu-memory-utilization for GPU memory"

UNSERVED = {
    "--model": "name the model as the first argument: kvasir serve MODEL",
    "-q": "write it out: --quantization, or --weights",
    "--calculate-kv-scales": "stored keys and values need no scales; see --kv-codec",
    "--fully-sharded-loras": _DEVICES,
    "--lora-dtype": "adapters have the model's type; see --dtype",
    "--lora-extra-vocab-size": "adapters with new tokens are merged: kvasir convert merge_lora",
    "--enable-prompt-adapter": "LoRA adapters are served; see --enable-lora",
    "--default-mm-loras": _TEXT,
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--num-speculative-tokens": _SPECULATION,
    "--swap-space": _OFFLOAD,
    "--cpu-offload-gb": _OFFLOAD,
    "--kv-transfer-config": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--preemption-mode": _OFFLOAD,
    "--kv-cache-memory-bytes": _CPU,
    "--trust-remote-code": "code from a checkpoint is never run; for an unknown family, `kvasir serve` lists those it "
    "serves",
    "--limit-mm-per-prompt": _TEXT,
    "--mm-processor-kwargs": _TEXT,
    "--media-io-kwargs": _TEXT,
    "--allowed-local-media-path": _TEXT,
    "--interleave-mm-strings": _TEXT,
    "--skip-mm-profiling": _TEXT,
    "--mm-encoder-tp-mode": _TEXT,
    "--guided-decoding-backend": _GRAMMAR,
    "--guided-decoding-disable-any-whitespace": _GRAMMAR,
    "--structured-outputs-config": _GRAMMAR,
    "--logits-processor-pattern": "code from a client is never run",
    "--num-scheduler-steps": _STEPS,
    "--multi-step-stream-outputs": _STEPS,
    "--async-scheduling": _STEPS,
    "--scheduler-delay-factor": _STEPS,
    "--scheduler-cls": "use --scheduling-policy",
    "--scheduler-reserve-full-isl": _STEPS,
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; --max-num-batched-tokens sets their size",
    "--max-num-partial-prefills": "use --long-prefill-token-threshold",
    "--max-long-partial-prefills": "use --long-prefill-token-threshold",
    "--prefix-caching-hash-algo": "prefix keys are hashed and their tokens compared; there is no choice",
    "--disable-sliding-window": "window layers keep their window, as the model was trained",
    "--compilation-config": _GRAPHS,
    "-O": _GRAPHS,
    "--cuda-graph-sizes": _GRAPHS,
    "--max-seq-len-to-capture": _GRAPHS,
    "--distributed-executor-backend": _DEVICES,
    "--enable-expert-parallel": _DEVICES,
    "--disable-custom-all-reduce": _DEVICES,
    "--data-parallel-size-local": _PARALLEL,
    "--data-parallel-address": _PARALLEL,
    "--headless": _PARALLEL,
    "--max-parallel-loading-workers": _DEVICES,
    "--rope-scaling": _ROPE,
    "--rope-theta": _ROPE,
    "--hf-overrides": "edit the checkpoint's config.json",
    "--hf-token": _HUB,
    "--download-dir": _HUB,
    "--hf-config-path": "config.json is read from the model's folder",
    "--tokenizer-revision": "give a folder to --tokenizer",
    "--code-revision": "code from a checkpoint is never run",
    "--override-generation-config": "use --generation-config none, and send the sampling parameters with each request",
    "--override-pooler-config": _EMBED,
    "--convert": _EMBED,
    "--pooler-config": _EMBED,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--root-path": _HTTP,
    "--middleware": _HTTP,
    "--allow-credentials": _HTTP,
    "--allowed-methods": _HTTP,
    "--allowed-headers": _HTTP,
    "--uvicorn-log-level": _HTTP,
    "--enable-server-load-tracking": "see /metrics",
    "--disable-frontend-multiprocessing": _HTTP,
    "--response-role": "answers have the role assistant",
    "--return-tokens-as-token-ids": "send return_token_ids with the request",
    "--chat-template-content-format": "kvasir finds it by looking at the chat template",
    "--tool-parser-plugin": "use --tool-call-parser",
    "--enable-reasoning": "use --reasoning-parser",
    "--max-logprobs": "the limit is fixed",
    "--enable-sleep-mode": "stop the server and start it again",
    "--enable-log-requests": "use --log-requests",
    "--no-disable-log-stats": "`kvasir serve` logs them unless told not to, and counts them in /metrics",
    "--max-log-len": "the text of requests is never logged",
}


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without vLLM's flags, which its ``LLM`` takes as keywords. Raises ConfigError for a flag that
    is not served."""
    left = dict(options)
    if left.get("quantization", ...) is None:  # vLLM's way to say: as stored
        del left["quantization"]
    for name, value in options.items():
        plain = "--" + name.replace("_", "-")
        flag = plain.replace("--", "--no-", 1) if value is False else plain
        only = next((served for flags, served in (ONLY_AT | ONLY_AT_OFFLINE).items() if flag in flags), ())
        if only and value is not None and str(value) not in only:
            raise ConfigError(f"{name}={value!r} is not served yet; only {' or '.join(only)} is.")
        # 0 GiB of offload and empty overrides ask for nothing, and a feature may be turned off.
        if flag in UNSERVED and (value or flag != plain):
            raise ConfigError(f"kvasir does not serve vLLM's {name}={value!r}: {UNSERVED[flag]}.")
        if only or flag in (*SATISFIED, *SATISFIED_OFFLINE) or plain in UNSERVED:  # an unserved flag was not asked for
            del left[name]
    return left
