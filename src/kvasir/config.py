"""All settings, as frozen dataclasses that are composed and not inherited.

Field names are unique across sections, so that ``LLM(max_num_seqs=8)``, ``--max-num-seqs 8`` and ``[scheduler]
max_num_seqs = 8`` in a TOML file mean the same. An unknown name is refused with the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvasir.compose import compose
from kvasir.errors import ConfigError, nearest
from kvasir.plain_files import refuse_special

# An origin as browsers send it: "*", "null", or a scheme and a host.
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


def opt(
    default: Any, help: str, *aliases: str, low: float | None = None, high: float | None = None, off: str = ""
) -> Any:
    """Define a setting: its help line, vLLM's names for it where they differ, the range of values, and vLLM's flag that
    turns it off."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "low": low, "high": high, "off": off})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to load."""

    model: str = opt("", "Checkpoint folder or hub id; empty: the model that ships in the package.")
    revision: str | None = opt(None, "Branch, tag or commit on the hub.")
    tokenizer: str | None = opt(None, "Folder or hub id of the tokenizer; default: the model's.")
    served_model_name: str | None = opt(None, "Model name in the API; default: the model as given.")
    task: Literal["auto", "generate", "embed", "score"] = opt(
        "auto", "Work of the model; auto: what the checkpoint was made for (generate text, embed, or score pairs)."
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "Device to run on; auto takes a GPU when torch sees one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        "auto", "Type of weights and KV; auto: as stored on a GPU, float32 on a CPU."
    )
    weights: str = opt(
        "auto",
        "Format that a plain checkpoint's matrices are quantised to at loading: a name that `kvasir doctor` lists; "
        "then :key=value,key=value; auto: as stored.",
        "quantization",
    )
    activation_dtype: Literal["auto", "bf16", "fp8"] = opt(
        "auto",
        "Type of activations in products of more than 64 rows with quantised weights, on a GPU; auto: what the "
        "checkpoint was made for.",
    )
    token_rounding: Literal["off", "nearest", "up", "down"] = opt(
        "off",
        "Lossy: in steps with many rows of prompts, round the rows of each expert to a multiple of 128 (SonicMoE).",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = opt(
        "auto", "Source of the weights; dummy fills the model's shape with random weights, to measure speed."
    )
    max_model_len: int | None = opt(
        None, "Longest prompt plus output, in tokens; default: the length the model was made for.", low=1
    )
    skip_tokenizer_init: bool = opt(False, "Load no tokenizer; prompts are then token ids.")
    chat_template: str | None = opt(None, "Jinja file (or text) to use instead of the checkpoint's chat template.")
    generation_config: Literal["auto", "none"] = opt(
        "auto", "Source of the sampling defaults; auto: the checkpoint's generation_config.json."
    )
    seed: int = opt(0, "Seed of dummy weights.", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool."""

    gpu_memory_utilization: float = opt(
        0.9, "Share of the GPU memory free at start for weights, one step and the KV pool.", low=0.01, high=1
    )
    cpu_cache_bytes: int = opt(1 << 29, "Bytes of the KV pool on a CPU.", low=1)
    kv_codec: str = opt(
        "plain",
        "Storage format of keys and values: a name that `kvasir doctor` lists, or a file; then :key=value,key=value.",
        "kv-cache-dtype",
    )
    kv_policy: str = opt(
        "off",
        "Which tokens the cache forgets: one policy that `kvasir doctor` lists, or two as PROMPT+ANSWER, each with "
        ":key=value,key=value. Answers then differ from those of the whole cache.",
    )
    page_slots: int | None = opt(None, "Tokens per page; default: the codec's choice, 16 to 64.", "block-size", low=1)
    num_pages: int | None = opt(
        None, "Pages in the pool; default: as many as fit the memory.", "num-gpu-blocks-override", low=1
    )
    enable_prefix_caching: bool = opt(True, "Share the KV of prompts that begin alike.")
    prefix_eviction: str = opt(
        "expected_loss",
        "Which cached page goes first when pages run out: by an order that `kvasir doctor` lists, or one in a file.",
    )
    state_interval: int = opt(2048, "Tokens between two snapshots of a recurrent model's state in the cache.", low=1)
    state_dtype: Literal["float32", "bfloat16"] = opt(
        "float32",
        "Type of a recurrent model's states; bfloat16 takes half the memory and rounds them every step.",
        "mamba-ssm-cache-dtype",
    )
    kv_host_bytes: int | None = opt(
        None,
        "Bytes of host memory for pages that leave the device; default: off, but with --kv-disk on a GPU a quarter of "
        "free host memory; 0: off.",
        low=0,
    )
    kv_disk: str | None = opt(
        None, "Folder for pages that leave the device and host memory, found again after a restart: PATH,bytes=N."
    )
    kv_disk_key: str | None = opt(
        None, "Secret under which pages lie in --kv-disk; default: one that is kept in the folder."
    )
    kv_tier: tuple[str, ...] = opt(
        (), "Further tier below those, by name or file; then :key=value,key=value (repeatable)."
    )
    fit: bool = opt(False, "Shorten the context to the length that fits instead of refusing to start.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The rules by which steps are filled."""

    max_num_seqs: int = opt(256, "Most sequences that run at once.", low=1)
    max_num_batched_tokens: int | None = opt(
        None, "Most rows per step; default: 8192 on a GPU of 80 GB or more, 2048 on others, 256 on a CPU.", low=1
    )
    long_prefill_token_threshold: int = opt(0, "Most rows of one sequence per step; 0: no limit.", low=0)
    scheduling_policy: str = opt(
        "fcfs",
        "Which requests go first: by a policy that `kvasir doctor` lists, or one in a file.",
    )
    target_itl: float | None = opt(
        None,
        "Target for the seconds between two tokens of a request, reached with smaller prompt chunks; default: none.",
        low=0.0001,
    )
    max_ttft: float | None = opt(
        None, "Answer 429 to a request whose predicted wait for the first token is longer; default: never.", low=0.001
    )
    max_queued_requests: int = opt(4096, "Answer 429 while this many requests wait.", low=1)
    max_queued_tokens: int | None = opt(
        None, "Answer 429 while this many prompt tokens wait; default: 4 times the KV pool.", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The way a step is computed."""

    attention_backend: str = opt(
        "auto", "Attention backend; auto takes the quickest that can serve the model here (see `kvasir doctor`)."
    )
    product_backend: str = opt(
        "auto",
        "Backend of products with quantised weights: triton (our own), humming, or auto: ours unless an installed one "
        "is quicker here.",
    )
    recurrence_backend: str = opt(
        "auto",
        "Kernels for long spans of Gated DeltaNet and Kimi Delta Attention: ours, or those of fla-core; auto takes the "
        "quickest that is installed.",
    )
    cuda_graphs: bool = opt(True, "Capture decode steps in CUDA graphs.", off="enforce-eager")
    fused_kernels: bool = opt(
        True,
        "Use kvasir's own kernels for norms, RoPE, activations, products of a few rows and whole CPU steps; off: "
        "torch's, to measure the difference.",
    )
    overlap: bool | None = opt(None, "Launch a step before the previous one is read; default: on a GPU only.")
    batch_invariant: bool = opt(
        False, "Exact mode: a request's tokens do not depend on the other requests in the batch (slower)."
    )
    num_threads: int | None = opt(
        None, "CPU threads for computing; default: one per core, one fewer in a server.", low=1
    )
    check: bool = opt(False, "Check every invariant after every step (for debugging).")
    poison: bool = opt(False, "Fill freed pages with NaN, so that reads of stale state show (for debugging).")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """The drafts that steps verify, which saves steps. In exact mode they change no token, elsewhere only ties."""

    drafter: str = opt(
        "",
        "Method that drafts tokens: a name that `kvasir doctor` lists, or a file; then :key=value,key=value; several "
        "joined by +; auto: what the checkpoint brings for it. Default: none.",
    )
    max_draft_tokens: int = opt(8, "Most tokens drafted per sequence and step.", low=1, high=256)
    draft_control: Literal["goodput", "length", "optimal", "fixed"] = opt(
        "goodput",
        "Drafts to verify: goodput: as many as pay; length: the same, but only for sequences that will run long "
        "(rollouts); optimal: by the formula for the least makespan; fixed: all (to measure).",
    )
    learn: str = opt("off", "Train the drafter on what is served: off, or on:device=auto,share=0.1,every=200,lam=0.25.")
    learn_tenants: tuple[str, ...] = opt((), "API key to learn from, and to draft for with that, or all (repeatable).")
    learn_out: str | None = opt(None, "Folder for learned weights, as --drafter NAME:model= takes it; default: none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters that are served beside the model. Each request may name one."""

    enable_lora: bool = opt(False, "Serve LoRA adapters.")
    max_loras: int = opt(8, "Most adapters that one step computes; each has a slot on the device.", low=1, high=1024)
    max_lora_rank: int = opt(16, "Largest rank of an adapter; slots are sized for it.", low=1, high=256)
    max_cpu_loras: int = opt(
        32, "Most adapters kept in host memory; others are read again when they are asked for.", low=1
    )
    lora_modules: tuple[str, ...] = opt(
        (), 'Adapter to load at the start: NAME=FOLDER, or JSON with "name" and "path" (repeatable).'
    )

    def __post_init__(self) -> None:
        if self.enable_lora and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: an adapter on the device "
                "is kept in host memory, too. Raise --max-cpu-loras or lower --max-loras."
            )

    def modules(self) -> dict[str, str]:
        """The folders of ``lora_modules`` by name. Raises ConfigError for what is neither NAME=FOLDER nor JSON, and
        where adapters are not served."""
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules names adapters, which are served with --enable-lora only")
        found: dict[str, str] = {}
        for text in self.lora_modules:
            for name, path in _modules(text):
                if name in found:
                    raise ConfigError(f"lora_modules: two adapters are named '{name}'")
                found[name] = path
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HookConfig:
    """Sets of hooks on hidden states. Each request may name one."""

    hook: tuple[str, ...] = opt((), "Set of hooks that requests may name: NAME=FOLDER (repeatable).")

    def folders(self) -> dict[str, str]:
        """The folders of ``hook`` by name. Raises ConfigError for what is not NAME=FOLDER."""
        found: dict[str, str] = {}
        for text in self.hook:
            name, _, path = text.partition("=")
            if not name or not path:
                raise ConfigError(f"hook: {text!r} is not NAME=FOLDER")
            if name in found:
                raise ConfigError(f"hook: two sets are named '{name}'")
            found[name] = path
        return found


def _modules(text: str) -> list[tuple[str, str]]:
    """Names and folders in one value of ``lora_modules``."""
    if text.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"lora_modules: {text!r} is not valid JSON: {e}") from e
        listed = given if isinstance(given, list) else [given]
        pairs = [(o.get("name", ""), o.get("path", "")) if isinstance(o, dict) else ("", "") for o in listed]
    else:
        name, _, path = text.partition("=")
        pairs = [(name, path)]
    whole = [(name, path) for name, path in pairs if isinstance(name, str) and isinstance(path, str) and name and path]
    if len(whole) < len(pairs) or not whole:
        raise ConfigError(f'lora_modules: {text!r} is neither NAME=FOLDER nor JSON with "name" and "path"')
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The supervision of the engine process. Times are in seconds."""

    watchdog: float = opt(60.0, "Restart the engine process when it makes no progress for this many seconds.", low=0.1)
    startup_timeout: float = opt(900.0, "Most seconds that the engine process may take to start.", low=0.1)
    drain_timeout: float = opt(30.0, "Seconds that running requests get to finish after SIGTERM.", low=0)
    grammar_timeout: float = opt(5.0, "Most seconds that a grammar may take to compile.", low=0.01)
    max_crashes_per_request: int = opt(
        2, "Fail a request after this many crashes of the engine process in which it was at work.", low=1
    )
    crash_dumps: str | None = opt(
        None,
        "Folder for crash dumps: the last steps of an engine process that died, without prompts; empty: none; default: "
        "the system's folder for temporary files.",
    )
    kv_events_config: str | None = opt(
        None,
        "Publish which pages of the prefix cache are stored and evicted, for routers elsewhere: a JSON object (see "
        "docs/cluster.md; needs the extra [events]); default: off.",
    )
    journal: str | None = opt(
        None,
        "File that keeps background responses, which the next server finishes, and unfinished requests at shutdown.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server. It listens on loopback unless told otherwise, and refuses other addresses without a key."""

    host: str = opt("127.0.0.1", "Address to listen on.")
    port: int = opt(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    uds: str | None = opt(None, "Unix socket to listen on instead.")
    api_key: tuple[str, ...] = opt((), "Key that clients must send, as a bearer token or as x-api-key (repeatable).")
    insecure: bool = opt(False, "Allow listening beyond this machine without a key.")
    allowed_origins: tuple[str, ...] = opt((), "Origin that browsers may call from (CORS; repeatable).")
    allowed_hosts: tuple[str, ...] = opt(
        (),
        "Name by which requests may reach this server, besides those of loopback (repeatable; *.example.com, * for "
        "any). Without one, names are checked on a loopback address without a key.",
    )
    max_body_bytes: int = opt(16 << 20, "Largest request body, in bytes.", low=1)
    max_concurrent_per_key: int = opt(0, "Most concurrent requests per key; 0: no limit.", low=0)
    max_output_tokens: int = opt(
        0, "Most tokens of an answer; a larger max_tokens is cut to it, with a warning header; 0: no limit.", low=0
    )
    key_max_output_tokens: tuple[str, ...] = opt(
        (), "Most tokens of an answer for one key, instead of --max-output-tokens: KEY=N, 0: no limit (repeatable)."
    )
    model_alias: tuple[str, ...] = opt((), "Further name of the model that requests may give (repeatable).")
    lenient: bool = opt(False, "Ignore unknown body parameters, with a warning header, instead of refusing them.")
    tool_call_parser: str = opt("auto", "Format of the model's tool calls; auto looks at the chat template.")
    allow_runtime_lora: bool = opt(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter: who may call them loads any folder."
    )
    reasoning_parser: str = opt("auto", "Format of the model's reasoning; auto looks at the chat template.")
    processors: tuple[str, ...] = opt((), "Logit processor that requests may name (repeatable).")
    enable_client_chat_template: bool = opt(False, "Let clients send a chat template (it runs in a sandbox).")
    enable_tokenizer_info_endpoint: bool = opt(
        False, "Serve GET /tokenizer_info: the tokenizer's configuration and the chat template."
    )
    scaling_runs: str | None = opt(
        None, "Folder that keeps background runs of /v1/scaling/runs, so that the next server can continue them."
    )
    request_timeout: float = opt(
        600.0,
        "Seconds that a body may take to arrive, and that a reply may stay unread, before the client is disconnected. "
        "A body that stalls for 10 seconds gets 408.",
        low=0.01,
    )
    log_requests: bool = opt(False, "Log one line per request.")
    log_stats: bool = opt(
        True, "Log one line about the load every --log-stats-interval while requests run.", off="disable-log-stats"
    )
    log_stats_interval: float = opt(10.0, "Seconds between two lines about the load; 0: none.", low=0)
    replicas: int = opt(
        1,
        "Engine processes behind this server, each on a GPU of its own; on a CPU they share the cores.",
        "data-parallel-size",
        "-dp",
        low=1,
    )
    cluster: str | None = opt(
        None,
        "Ray cluster whose hosts run the replicas: its address, or auto, which joins that of this host or starts one "
        "(needs the extra [cluster]); default: replicas run on this host, without Ray.",
    )
    router: str = opt("cost", "Rule by which replicas get requests: one that `kvasir doctor` lists, or a file.")
    admin_key: str | None = opt(
        None, "Key of /admin/replicas, which drains, restarts, adds and removes replicas; without one it is not served."
    )
    public_metrics: bool = opt(False, "Serve /metrics without a key.")
    otlp_traces_endpoint: str | None = opt(
        None,
        "Collector that gets a trace of each request over OTLP/HTTP, e.g. http://localhost:4318/v1/traces "
        "(needs the extra [otel]); default: none.",
    )

    def __post_init__(self) -> None:
        origins = tuple(origin for text in self.allowed_origins for origin in _origins(text))
        if (bad := next((o for o in origins if not ORIGIN.fullmatch(o)), None)) is not None:
            raise ConfigError(
                f"allowed_origins: no browser sends {bad!r}. Write an origin as https://example.com, without a path or "
                "a slash at the end, or *"
            )
        object.__setattr__(self, "allowed_origins", origins)
        if self.admin_key is not None and (not self.admin_key.strip() or self.admin_key in self.api_key):
            raise ConfigError("admin_key is empty or an API key, too. Choose one that clients do not have")
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint!r}: traces are sent over HTTP, not gRPC. Give the "
                "collector's URL for that, usually http://HOST:4318/v1/traces"
            )

    def output_limits(self) -> dict[str, int]:
        """The limits of ``key_max_output_tokens`` by key. Raises ConfigError, which names no key: it may be logged."""
        limits: dict[str, int] = {}
        for i, text in enumerate(self.key_max_output_tokens, start=1):
            key, _, number = text.rpartition("=")
            if not (number.isascii() and number.isdecimal() and len(number) < 19):
                why = "is not KEY=N, with N tokens, or 0 for no limit"
            elif key not in self.api_key:
                why = "names a key that no --api-key gives"
            elif key in limits:
                why = "names a key that has a limit already"
            else:
                limits[key] = int(number)
                continue
            raise ConfigError(f"key_max_output_tokens: entry {i} {why}")
        return limits


def _origins(text: str) -> list[str]:
    """The origins in ``text``: one origin, or in vLLM's spelling a JSON list of them."""
    try:
        listed = json.loads(text)
    except ValueError:
        return [text]
    return listed if isinstance(listed, list) and all(isinstance(o, str) for o in listed) else [text]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of the engine, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    hooks: HookConfig = field(default_factory=HookConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Build from flat names: ``EngineConfig.of(model="path", max_num_seqs=8)``. Raises ConfigError."""
        return compose(cls, options)

    def replace(self, **options: Any) -> EngineConfig:
        """A copy with other values, by flat names. Raises ConfigError."""
        return compose(type(self), options, base=self)

    def engine_only(self) -> EngineConfig:
        """The sections of the engine alone; a server's settings also hold its keys, which the engine must not see."""
        return EngineConfig(
            **{section.name: getattr(self, section.name) for section in dataclasses.fields(EngineConfig)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineConfig):
    """The settings of engine and server together, as ``kvasir serve`` and a TOML file give them."""

    server: ServerConfig = field(default_factory=ServerConfig)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read flat options from a TOML file, whose names may stand at the top or under their section.
    Raises ConfigError."""
    refuse_special(Path(path), "--config")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ConfigError(f"--config: cannot read the settings file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"--config: {path} is not valid TOML: {e}") from e
    sections = {
        s.name: {f.name for f in dataclasses.fields(s.default_factory)}  # type: ignore[arg-type, misc]
        for s in dataclasses.fields(Settings)
    }
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if not isinstance(value, dict):
            flat[name] = value
            continue
        if name not in sections:
            raise ConfigError(f"{path}: unknown section [{name}].{nearest(name, sections)}")
        for key, v in value.items():
            if key not in sections[name]:
                raise ConfigError(f"{path}: unknown setting '{key}' in [{name}].{nearest(key, sections[name])}")
            flat[key] = v
    return flat
