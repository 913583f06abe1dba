"""Every setting, as frozen dataclasses that are composed, not inherited.

Field names are unique across sections, so that ``LLM(max_num_seqs=8)``, ``--max-num-seqs 8`` and ``[scheduler]
max_num_seqs = 8`` in a TOML file mean the same. An unknown name is refused with the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvasir.errors import ConfigError, nearest

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it


def opt(
    default: Any, help: str, *aliases: str, low: float | None = None, high: float | None = None, off: str = ""
) -> Any:
    """A setting with its help line, vLLM's spelling of it if that differs, the smallest and largest value allowed, and
    vLLM's flag that turns it off."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "low": low, "high": high, "off": off})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to load."""

    model: str = opt("", "Checkpoint folder or hub id; empty means the model that ships in the package.")
    revision: str | None = opt(None, "Branch, tag or commit on the hub.")
    tokenizer: str | None = opt(None, "Folder or hub id of the tokenizer, if it is not the model's.")
    served_model_name: str | None = opt(None, "The name the API answers to; default: the model as given.")
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "Where to run; auto takes a GPU when torch sees one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        "auto", "Type of weights and KV; auto: as stored on a GPU, float32 on a CPU."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = opt(
        "auto", "dummy fills the shape with random weights, to measure speed."
    )
    max_model_len: int | None = opt(
        None, "Longest prompt plus output, in tokens; default: what the model was made for.", low=1
    )
    skip_tokenizer_init: bool = opt(False, "Load no tokenizer; prompts are token ids only.")
    chat_template: str | None = opt(None, "A Jinja file (or text) to use instead of the checkpoint's chat template.")
    generation_config: Literal["auto", "none"] = opt(
        "auto", "Whether sampling defaults come from the checkpoint's generation_config.json."
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
        "How keys and values are stored: a name that `kvasir doctor` lists, or a file; then :key=value,key=value.",
        "kv-cache-dtype",
    )
    page_slots: int | None = opt(
        None, "Tokens a page holds; default: as the codec says, 16 to 64.", "block-size", low=1
    )
    num_pages: int | None = opt(
        None, "Pages in the pool, instead of what was measured to fit.", "num-gpu-blocks-override", low=1
    )
    enable_prefix_caching: bool = opt(True, "Share the KV of equal prompt beginnings.")
    fit: bool = opt(False, "Shorten the context to what fits instead of refusing to start, and say why.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int = opt(256, "Most sequences that run at once.", low=1)
    max_num_batched_tokens: int | None = opt(
        None, "Most rows a step; default 8192 on a GPU of 80 GB or more, 2048 on others, 256 on a CPU.", low=1
    )
    long_prefill_token_threshold: int = opt(0, "Most rows of one sequence a step; 0: no bound.", low=0)
    scheduling_policy: str = opt(
        "fcfs",
        "Which requests go first: by a policy that `kvasir doctor` lists, or one in a file.",
    )
    target_itl: float | None = opt(
        None,
        "Most seconds between two tokens of a request; prompts then come in smaller chunks. Default: no bound.",
        low=0.0001,
    )
    max_ttft: float | None = opt(
        None, "Most seconds to the first token; a request predicted to wait longer gets 429. Default: none.", low=0.001
    )
    max_queued_requests: int = opt(4096, "Requests that may wait before new ones get 429.", low=1)
    max_queued_tokens: int | None = opt(
        None, "Prompt tokens that may wait before new requests get 429; default 4x the KV pool.", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a step is computed."""

    attention_backend: str = opt(
        "auto", "auto takes what can serve the model here, the quickest of several; `kvasir doctor` says why."
    )
    cuda_graphs: bool = opt(True, "Capture decode steps in CUDA graphs.", off="enforce-eager")
    fused_kernels: bool = opt(
        True,
        "Own kernels for norms, RoPE, activations and products of a few rows, and whole steps on a CPU; off: torch's "
        "(to measure).",
    )
    overlap: bool | None = opt(None, "Launch a step before the one before it is read; default: on a GPU.")
    batch_invariant: bool = opt(
        False, "Exact mode: a request's tokens do not depend on what else is in the batch (slower)."
    )
    num_threads: int | None = opt(
        None, "CPU threads of the computation; default: one a core, one fewer in a server.", low=1
    )
    check: bool = opt(False, "Check every invariant after every step (for debugging).")
    poison: bool = opt(False, "Fill freed pages with NaN, so that a read of stale state is seen (for debugging).")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafts that a step verifies beside the tokens it draws. They change no token, only how many a step gives."""

    drafter: str = opt(
        "",
        "Who proposes tokens: a name that `kvasir doctor` lists, or a file; then :key=value,key=value; several joined by +; "
        "empty: nobody.",
    )
    max_draft_tokens: int = opt(8, "Most tokens proposed for a sequence a step.", low=1, high=256)
    draft_control: Literal["goodput", "length", "fixed"] = opt(
        "goodput",
        "How much of a proposal is verified: what pays; of sequences that "
        "will run long, what pays (rollouts); or all of it (to measure).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The engine process. Times in seconds."""

    watchdog: float = opt(
        60.0,
        "A step that takes longer than this many seconds means the engine process hangs: it is restarted.",
        low=0.1,
    )
    startup_timeout: float = opt(900.0, "Seconds the engine process may take to start.", low=0.1)
    drain_timeout: float = opt(30.0, "Seconds running requests get to finish after SIGTERM.", low=0)
    grammar_timeout: float = opt(5.0, "Seconds a grammar may take to compile.", low=0.01)
    max_crashes_per_request: int = opt(
        2, "A request seen in this many crashes of the engine process is refused.", low=1
    )
    journal: str | None = opt(None, "File that unfinished requests are written to at shutdown (JSON lines).")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server. It listens on loopback unless told otherwise, and refuses other addresses without a key."""

    host: str = opt("127.0.0.1", "Address to listen on.")
    port: int = opt(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    uds: str | None = opt(None, "Unix socket to listen on instead.")
    api_key: tuple[str, ...] = opt((), "Keys that clients must send as a bearer token (repeatable).")
    insecure: bool = opt(False, "Listen beyond this machine without a key.")
    allowed_origins: tuple[str, ...] = opt((), "Origins that browsers may call from (CORS; repeatable).")
    max_body_bytes: int = opt(16 << 20, "Largest request body.", low=1)
    max_concurrent_per_key: int = opt(0, "Most requests at once of one key; 0: no bound.", low=0)
    lenient: bool = opt(False, "Ignore unknown body parameters with a warning header instead of refusing them.")
    tool_call_parser: str = opt("auto", "Format of the model's tool calls; auto looks at the chat template.")
    reasoning_parser: str = opt("auto", "Format of the model's reasoning; auto looks at the chat template.")
    enable_client_chat_template: bool = opt(False, "Let clients send a chat template (it runs in a sandbox).")
    scaling_runs: str | None = opt(
        None, "Folder that keeps background runs of /v1/scaling/runs, so that the next server goes on with them."
    )
    request_timeout: float = opt(
        600.0,
        "Seconds a body may take to arrive, and a reply may stay unread, before the client is dropped. A body must "
        "also keep coming: 10 seconds without a byte are a 408.",
        low=0.01,
    )
    log_requests: bool = opt(False, "Log one line a request.")

    def __post_init__(self) -> None:
        origins = tuple(origin for text in self.allowed_origins for origin in _origins(text))
        if (bad := next((o for o in origins if not ORIGIN.fullmatch(o)), None)) is not None:
            raise ConfigError(
                f"allowed_origins: no browser sends {bad!r}. Write one as https://example.com, without a path or a last slash, or *"
            )
        object.__setattr__(self, "allowed_origins", origins)


def _origins(text: str) -> list[str]:
    """One origin, or vLLM's spelling: a JSON list of them."""
    try:
        listed = json.loads(text)
    except ValueError:
        return [text]
    return listed if isinstance(listed, list) and all(isinstance(o, str) for o in listed) else [text]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From flat names: ``EngineConfig.of(model="path", max_num_seqs=8)``. Sections may be given whole, too."""
        return compose(cls, options)

    def replace(self, **options: Any) -> EngineConfig:
        return compose(type(self), options, base=self)

    def engine_only(self) -> EngineConfig:
        """All sections of the engine, and no others: a server's settings hold its keys."""
        return EngineConfig(
            **{section.name: getattr(self, section.name) for section in dataclasses.fields(EngineConfig)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineConfig):
    """Engine and server together: what ``kvasir serve`` and a TOML file describe."""

    server: ServerConfig = field(default_factory=ServerConfig)


def _owners(cls: type) -> dict[str, tuple[str, dataclasses.Field]]:
    """flat name -> (section, field)."""
    owners: dict[str, tuple[str, dataclasses.Field]] = {}
    for section in dataclasses.fields(cls):
        for f in dataclasses.fields(section.default_factory):  # type: ignore[arg-type, misc]
            assert f.name not in owners, f"two sections own '{f.name}'"
            owners[f.name] = (section.name, f)
    return owners


def compose(cls: type, options: Mapping[str, Any], base: Any = None) -> Any:
    """Build ``cls`` from flat options, by our names or vLLM's. Raises ConfigError for an unknown name or a value of the wrong type."""
    owners = _owners(cls)
    options = _by_our_names(options, owners)
    base = base or cls()
    changes: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in owners:
            section, f = owners[name]
            changes.setdefault(section, {})[name] = _checked(name, value, f)
        else:
            raise ConfigError(f"unknown setting '{name}'.{nearest(name, owners)}")
    return dataclasses.replace(base, **{s: dataclasses.replace(getattr(base, s), **c) for s, c in changes.items()})


def _by_our_names(options: Mapping[str, Any], owners: Mapping[str, tuple[str, dataclasses.Field]]) -> dict[str, Any]:
    """``kv_cache_dtype`` is ``kv_codec``, ``enforce_eager=True`` is ``cuda_graphs=False``: the names of the command line. Raises ConfigError
    where one setting has two values."""
    ours = {
        alias.replace("-", "_"): name
        for name, (_, f) in owners.items()
        for alias in f.metadata["aliases"]
        if len(alias) > 1
    }
    off = {f.metadata["off"].replace("-", "_"): name for name, (_, f) in owners.items() if f.metadata["off"]}
    found: dict[str, Any] = {}
    as_given: dict[str, str] = {}
    for given, value in options.items():
        name = given if given in owners else ours.get(given, off.get(given, given))
        if given not in owners and given in off and isinstance(value, bool):
            value = not value
        if name in found:
            raise ConfigError(f"{as_given[name]} and {given} are one setting: give one of them")
        found[name], as_given[name] = value, given
    return found


def _checked(name: str, value: Any, f: dataclasses.Field) -> Any:
    """Accept what the annotation says (as written in this file); TOML and JSON lists become tuples."""
    kind = str(f.type)
    if isinstance(value, list):
        value = tuple(value)
    if kind.endswith("| None") and value is None:
        return value
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        allowed = [word.strip().strip("\"'") for word in kind[8:-1].split(",")]
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}.{nearest(str(value), allowed)}")
    elif kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif kind.split("[")[0] in ("bool", "int", "float", "str", "tuple"):
        wanted = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple}[kind.split("[")[0]]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"{name}={value!r}: expected {kind}, got {type(value).__name__}")
    low, high = f.metadata["low"], f.metadata["high"]
    if not (low is None or value >= low) or not (high is None or value <= high):
        raise ConfigError(
            f"{name}={value!r} is out of range: " + (f"at least {low}" if high is None else f"from {low} to {high}")
        )
    return value


def read_toml(path: str | Path) -> dict[str, Any]:
    """Flat options from a TOML file whose names stand at the top or under their section. Raises ConfigError."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the settings file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    sections = {s.name: {f.name for f in dataclasses.fields(s.default_factory)} for s in dataclasses.fields(Settings)}  # type: ignore[arg-type, misc]
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
