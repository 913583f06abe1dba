"""The flags of vLLM that kvasir has no setting for: accepted if they ask for what kvasir does anyway, accepted with a
line if they change nothing here, else refused by name.

So a start script written for vLLM either works unchanged, or the error says which flag is not served and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    ("--config-format",): ("auto", "hf", "mistral"),  # config.json is read in any case
    ("--nnodes",): ("1",),
    ("--decode-context-parallel-size", "-dcp"): ("1",),
    ("--prefill-context-parallel-size", "-pcp"): ("1",),
    ("--logprobs-mode",): ("raw_logprobs",),
    ("--model-impl",): ("auto",),
    ("--runner",): ("auto", "generate", "pooling"),  # found in the checkpoint; --task decides otherwise
}

# Likewise for everything except a server, which has a setting for it.
ONLY_AT_OFFLINE = {("--data-parallel-size", "-dp"): ("1",)}

# What to do about a value of such a flag that is not served.
_WHOLE_MODEL = (
    "one GPU holds the whole model: leave it out if the model fits one (kvasir show MODEL says what it needs), and "
    "--replicas N runs an engine on each of N GPUs"
)
INSTEAD = {
    "--tensor-parallel-size": _WHOLE_MODEL,
    "--pipeline-parallel-size": _WHOLE_MODEL,
    "--decode-context-parallel-size": _WHOLE_MODEL,
    "--prefill-context-parallel-size": _WHOLE_MODEL,
    "--nnodes": "start a server on each host, or give --cluster ADDRESS for replicas on several",
    "--data-parallel-size": "kvasir serve has --replicas N",
    "--tokenizer-mode": "leave it out: tokenizer.json of the model's folder is read",
    "--model-impl": "leave it out: models run in kvasir's own code",
    "--logprobs-mode": "leave it out: log-probabilities are those before temperature and filters",
}

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
    "--data-parallel-rpc-port": _PARALLEL,
    "--data-parallel-start-rank": _PARALLEL,
    "--data-parallel-rank": _PARALLEL,
    "--data-parallel-hybrid-lb": _PARALLEL,
    "--data-parallel-external-lb": _PARALLEL,
    "--node-rank": _PARALLEL,
    "--master-addr": _PARALLEL,
    "--master-port": _PARALLEL,
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
    "--reasoning-parser-plugin": "use --reasoning-parser",
    "--reasoning-config": "use --reasoning-parser",
    "--tool-server": "tools run at the client, which gets the model's calls",
    "--default-chat-template-kwargs": "send chat_template_kwargs with each request, or edit --chat-template FILE",
    "--exclude-tools-when-tool-choice-none": "leave the tools out of the request",
    "--enable-force-include-usage": "send stream_options.include_usage with the request",
    "--logits-processors": "use --processors NAME",
    "--kv-sharing-fast-prefill": "it changes answers; leave it out",
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--enable-mm-embeds": _TEXT,
    "--shutdown-timeout": "use --drain-timeout",
    "--worker-cls": "name a drafter, codec or policy of your own instead: see docs/adding-a-technique.md",
    "--worker-extension-cls": "name a drafter, codec or policy of your own instead: see docs/adding-a-technique.md",
    "--enable-log-outputs": "the text of answers is never logged",
    "--grpc": "the API is HTTP",
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
    "--disable-chunked-mm-input": _EYES,
    "--enable-ep-weight-filter": _WHERE,
    "--enable-mfu-metrics": "/metrics has its own counters",
    "--kv-cache-metrics": "/metrics has its own counters",
    "--cudagraph-metrics": "/metrics has its own counters",
    "--aggregate-engine-logging": "the server writes its own log",
    "--enable-request-id-headers": "answers name their request anyway",
    "--fail-on-environ-validation": "environment variables of vLLM are not read",
    "--numa-bind": _PACE,
}
VALUES = {
    "--limit-mm-per-prompt": _EYES,
    "--mm-processor-kwargs": _EYES,
    "--mm-processor-cache-gb": _EYES,
    "--mm-processor-cache-type": _EYES,
    "--mm-encoder-tp-mode": _EYES,
    "--mm-encoder-attn-backend": _EYES,
    "--mm-encoder-attn-dtype": _EYES,
    "--mm-shm-cache-max-object-size-mb": _EYES,
    "--video-pruning-rate": _EYES,
    "--media-io-kwargs": _EYES,
    "--swap-space": _HELD,
    "--compilation-config": _PACE,
    "-cc": _PACE,
    "-ac": _PACE,
    "-O": _PACE,
    "--performance-mode": _PACE,
    "--mamba-cache-mode": "states of recurrent layers are cached every --state-interval tokens",
    "--mamba-block-size": "states of recurrent layers are cached every --state-interval tokens",
    "--mamba-backend": _PACE,
    "--gdn-prefill-backend": _PACE,
    "--linear-backend": _PACE,
    "--additional-config": _PACE,
    "--ubatch-size": _PACE,
    "--dbo-decode-token-threshold": _PACE,
    "--dbo-prefill-token-threshold": _PACE,
    "--eplb-config": _WHERE,
    "--num-redundant-experts": _WHERE,
    "--ignore-patterns": "only the files that are needed are downloaded",
    "--disable-access-log-for-endpoints": "the server writes its own log",
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

_FILES = "weights are read from safetensors by several threads"
_MISTRAL = "config.json and its safetensors are read, which hold the same numbers"
_BACKEND = "the name of a backend in vLLM; the quickest here is taken, see --attention-backend"
# Values of our own flags that change nothing here, by flag; the flag is then left out.
VALUES_NOTED = {
    "--load-format": {
        **dict.fromkeys(("fastsafetensors", "runai_streamer", "instanttensor", "hf"), _FILES),
        "mistral": _MISTRAL,
    },
    "--attention-backend": dict.fromkeys(
        ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA", "CPU_ATTN", "XFORMERS",
         "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "CUTLASS_MLA", "TRITON_MLA", "TREE_ATTN", "ROCM_ATTN",
         "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_MLA", "TRITON_ATTN_VLLM_V1", "FLASH_ATTN_VLLM_V1",
         "FLASHINFER_VLLM_V1"),
        _BACKEND,
    ),
    "--mamba-ssm-cache-dtype": {"auto": "states of recurrent layers are kept in float32; see --state-dtype"},
}  # fmt: skip
# vLLM's words for values of ours: flag -> value -> the arguments that mean the same.
SPELLINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "--generation-config": {"vllm": ("--generation-config", "none")},
    "--dtype": {"half": ("--dtype", "float16"), "float": ("--dtype", "float32")},
    "--max-model-len": dict.fromkeys(("auto", "-1"), ("--fit",)),
    "--quantization": {
        name: ("--quantization", reader)
        for reader, names in {
            "awq": ("awq_marlin",),
            "gptq": ("gptq_marlin",),
            "modelopt": ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
        }.items()
        for name in names
    },
}
SPECULATION = "--speculative-config"


def unserved_value(flag: str, given: str, served: Sequence[str]) -> str:
    """The message for a value that is not served, with what to do instead."""
    flags = next((names for names in ONLY_AT | ONLY_AT_OFFLINE if flag in names), (flag,))
    instead = f" {INSTEAD[flags[0]][0].upper()}{INSTEAD[flags[0]][1:]}." if flags[0] in INSTEAD else ""
    return f"{given} is not served yet; only {' or '.join(served)} is.{instead}"
