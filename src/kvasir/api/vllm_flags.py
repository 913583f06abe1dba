"""The flags of vLLM that kvasir has no setting for: accepted if they ask for what kvasir does anyway, accepted with a
line if they change nothing here, else refused by name.

So a start script written for vLLM either works unchanged, or the error says which flag is not served and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    ("--tokenizer-mode",): ("auto", "hf", "mistral"),  # tokenizer.json is read in any case
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
    "--cpu-offload-gb": _OFFLOAD,
    "--kv-transfer-config": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--preemption-mode": _OFFLOAD,
    "--kv-cache-memory-bytes": _CPU,
    "--allowed-local-media-path": _TEXT,
    "--guided-decoding-disable-any-whitespace": _GRAMMAR,
    "--structured-outputs-config": _GRAMMAR,
    "--logits-processor-pattern": "code from a client is never run",
    "--num-scheduler-steps": _STEPS,
    "--multi-step-stream-outputs": _STEPS,
    "--scheduler-delay-factor": _STEPS,
    "--scheduler-cls": "use --scheduling-policy",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; --max-num-batched-tokens sets their size",
    "--max-num-partial-prefills": "use --long-prefill-token-threshold",
    "--max-long-partial-prefills": "use --long-prefill-token-threshold",
    "--disable-sliding-window": "window layers keep their window, as the model was trained",
    "--data-parallel-size-local": _PARALLEL,
    "--data-parallel-address": _PARALLEL,
    "--headless": _PARALLEL,
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
    "--response-role": "answers have the role assistant",
    "--return-tokens-as-token-ids": "send return_token_ids with the request",
    "--tool-parser-plugin": "use --tool-call-parser",
    "--enable-reasoning": "use --reasoning-parser",
    "--max-logprobs": "the limit is fixed",
    "--enable-sleep-mode": "stop the server and start it again",
    "--enable-log-requests": "use --log-requests",
    "--no-disable-log-stats": "`kvasir serve` logs them unless told not to, and counts them in /metrics",
}

# Flags of vLLM that change nothing here: why. Those in SWITCHES take no value.
_EYES = "only the text part of a model is served"
_WHERE = "one device holds the whole model"
_PACE = "this tunes vLLM's own machinery and no answer depends on it"
_HELD = "a preempted sequence is computed again, so nothing is swapped"
SWITCHES = {
    "--trust-remote-code": "code from a checkpoint is never run",
    "--language-model-only": _EYES,
    "--interleave-mm-strings": _EYES,
    "--skip-mm-profiling": _EYES,
    "--async-scheduling": "one step is launched ahead of the one being read anyway; see --overlap",
    "--scheduler-reserve-full-isl": _PACE,
    "--enable-expert-parallel": _WHERE,
    "--enable-eplb": _WHERE,
    "--enable-dbo": _WHERE,
    "--disable-custom-all-reduce": _WHERE,
    "--disable-cascade-attn": _PACE,
    "--disable-hybrid-kv-cache-manager": _PACE,
    "--disable-frontend-multiprocessing": _PACE,
    "--enable-flashinfer-autotune": _PACE,
    "--enable-server-load-tracking": "the load stands in /metrics anyway",
    "--use-tqdm-on-load": _PACE,
    "--numa-bind": _PACE,
}
VALUES = {
    "--limit-mm-per-prompt": _EYES,
    "--mm-processor-kwargs": _EYES,
    "--mm-processor-cache-gb": _EYES,
    "--mm-processor-cache-type": _EYES,
    "--mm-encoder-tp-mode": _EYES,
    "--mm-encoder-attn-backend": _EYES,
    "--media-io-kwargs": _EYES,
    "--swap-space": _HELD,
    "--compilation-config": _PACE,
    "-O": _PACE,
    "--optimization-level": _PACE,
    "--cuda-graph-sizes": _PACE,
    "--cudagraph-capture-sizes": _PACE,
    "--max-cudagraph-capture-size": _PACE,
    "--max-seq-len-to-capture": _PACE,
    "--kernel-config": _PACE,
    "--attention-config": _PACE,
    "--moe-backend": _PACE,
    "--all2all-backend": _WHERE,
    "--expert-placement-strategy": _WHERE,
    "--distributed-executor-backend": _WHERE,
    "--data-parallel-backend": _WHERE,
    "--max-parallel-loading-workers": _WHERE,
    "--safetensors-load-strategy": _PACE,
    "--model-loader-extra-config": _PACE,
    "--prefix-caching-hash-algo": "prefix keys are hashed and their tokens compared",
    "--guided-decoding-backend": "there is one grammar engine",
    "--stream-interval": "tokens are streamed as they come",
    "--uvicorn-log-level": "the server writes its own log",
    "--max-log-len": "the text of requests is never logged",
    "--chat-template-content-format": "the chat template itself shows how it reads content",
}
NOTED = SWITCHES | VALUES


def without_noted(args: Sequence[str], own: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the arguments without vLLM's flags that change nothing here, and one line for each such flag. They come as
    ``--a b``, ``--a=b``, ``--a.b c`` and ``--no-a``. ``own``: flags of the command itself, which stay."""
    left: list[str] = []
    said: dict[str, str] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            left += [arg, *rest]
            break
        head, equals, _ = arg.partition("=")
        short = arg[:2] == "-O" and not arg.startswith("--")
        flag = "-O" if short else "--" + head.lstrip("-").partition(".")[0].replace("_", "-")
        # Turning off what does nothing does nothing; to turn off what happens anyway is another matter.
        plain = flag.replace("--no-", "--", 1)
        if flag.startswith("--no-") and plain in SWITCHES and plain != "--async-scheduling":
            flag = plain
        if not arg.startswith("-") or flag in own or head in own or flag not in NOTED:
            left.append(arg)
            continue
        glued = equals or (short and len(arg) > 2 and "." not in arg)
        if flag in VALUES and not glued:
            if not rest or rest[0].startswith("--"):
                left.append(arg)  # its value is missing: an unknown flag says so
                continue
            rest.pop(0)
        said[flag] = f"vLLM's {flag} changes nothing here: {NOTED[flag]}."
    return left, list(said.values())


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
        if (
            only or flag in (*SATISFIED, *SATISFIED_OFFLINE) or plain in UNSERVED or plain in NOTED
        ):  # an unserved flag was not asked for
            del left[name]
    return left
