"""The adapter of a request in the Python API, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and PEFT folder. ``lora_int_id`` is taken for vLLM's sake and means nothing: an adapter is
    known by its name, and its content by a digest."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def load_once(engine: Engine, wanted: LoRARequest) -> str:
    """Load an adapter unless it is there, and return its name. Raises ConfigError (it is not served) and RequestError
    (the name belongs to another folder)."""
    if not isinstance(wanted, LoRARequest):
        raise RequestError(f"expected LoRARequest(...), got {type(wanted).__name__}", param="lora_request")
    if engine.adapters is None:
        raise ConfigError("lora_request needs adapters to be switched on: LLM(..., enable_lora=True)")
    known = engine.info.adapters.get(wanted.lora_name)
    if known is None:
        engine.adapters.load(wanted.lora_name, wanted.lora_path)
    elif wanted.lora_path not in ("", known.path):
        raise RequestError(
            f"adapter '{wanted.lora_name}' was loaded from {known.path}, not {wanted.lora_path}: take another name",
            param="lora_request",
        )
    return wanted.lora_name
