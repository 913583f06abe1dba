"""Every setting, as frozen dataclasses that are composed, not inherited.

Field names are unique across sections, so that ``LLM(max_num_seqs=8)``, ``--max-num-seqs 8`` and ``[scheduler]
max_num_seqs = 8`` in a TOML file mean the same. An unknown name is refused with the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvasir.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to load. ``model``: a folder or a hub id; empty means the model that ships in the package."""

    model: str = ""
    revision: str | None = None
    tokenizer: str | None = None
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: int | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool. ``num_pages`` overrides the measured size; ``cpu_cache_bytes`` is the pool on a CPU."""

    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 29
    kv_codec: str = "plain"
    page_slots: int | None = None
    num_pages: int | None = None
    enable_prefix_caching: bool = True
    fit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled. ``max_num_batched_tokens``: rows a step (None: 2048 on a GPU, 256 on a CPU);
    ``long_prefill_token_threshold``: most rows one sequence gets in a step (0: no bound)."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    max_queued_requests: int = 4096
    max_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a step is computed. ``batch_invariant``: exact mode, a row's bits do not depend on its batch."""

    attention_backend: str = "auto"
    batch_invariant: bool = False
    num_threads: int | None = None
    check: bool = False
    poison: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The engine process. Times in seconds. ``watchdog``: longest a step may take before the process is restarted."""

    watchdog: float = 60.0
    startup_timeout: float = 900.0
    drain_timeout: float = 30.0
    grammar_timeout: float = 5.0
    max_crashes_per_request: int = 2
    journal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server. It listens on loopback unless told otherwise, and refuses other addresses without a key."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_concurrent_per_key: int = 0
    lenient: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_client_chat_template: bool = False
    request_timeout: float = 600.0
    log_requests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From flat names: ``EngineConfig.of(model="path", max_num_seqs=8)``. Sections may be given whole, too."""
        return compose(cls, options)

    def replace(self, **options: Any) -> EngineConfig:
        return compose(type(self), options, base=self)


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
    """Build ``cls`` from flat options. Raises ConfigError for an unknown name or a value of the wrong type."""
    owners = _owners(cls)
    base = base or cls()
    changes: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in owners:
            section, f = owners[name]
            changes.setdefault(section, {})[name] = _checked(name, value, f)
        else:
            raise ConfigError(f"unknown setting '{name}'.{nearest(name, owners)}")
    return dataclasses.replace(base, **{s: dataclasses.replace(getattr(base, s), **c) for s, c in changes.items()})


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
        return float(value)
    elif kind.split("[")[0] in ("bool", "int", "float", "str", "tuple"):
        wanted = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple}[kind.split("[")[0]]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"{name}={value!r}: expected {kind}, got {type(value).__name__}")
    return value


def read_toml(path: str | Path) -> dict[str, Any]:
    """Flat options from a TOML file whose names stand at the top or under their section. Raises ConfigError."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the settings file {path}: {e.strerror}") from e
    except tomllib.TOMLDecodeError as e:
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
