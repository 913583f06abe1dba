"""Kvasir: an LLM inference engine in which every efficiency method is a switch. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.version import __version__ as __version__

if TYPE_CHECKING:
    from kvasir.api.offline.llm import LLM as LLM
    from kvasir.api.offline.lora import LoRARequest as LoRARequest
    from kvasir.client.engine_client import AsyncEngine as AsyncEngine
    from kvasir.config import EngineConfig as EngineConfig
    from kvasir.types import PoolingParams as PoolingParams
    from kvasir.types import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "kvasir.api.offline.llm",
    "LoRARequest": "kvasir.api.offline.lora",
    "SamplingParams": "kvasir.types",
    "PoolingParams": "kvasir.types",
    "EngineConfig": "kvasir.config",
    "AsyncEngine": "kvasir.client.engine_client",
    "RequestError": "kvasir.errors",
    "ConfigError": "kvasir.errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvasir' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
