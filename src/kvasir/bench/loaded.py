"""Engines that benchmarks load, with a line that says so meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.config import EngineConfig
from kvasir.progress import loading

if TYPE_CHECKING:
    from kvasir.api.offline.llm import LLM


def load_engine(config: EngineConfig) -> LLM:
    """Return a started engine in this process. Raises ConfigError."""
    from kvasir.api.offline.llm import LLM

    with loading(config.model.served_model_name or config.model.model):
        return LLM(config=config)
