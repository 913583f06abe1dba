"""``kvasir serve``."""

from __future__ import annotations

from typing import Any

from kvasir.cli.arguments import (
    Model,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, with_settings
from kvasir.config import Settings


@command(10)
@with_settings(Settings, skip=("model",))
def serve(model: Model = "", **options: Any) -> None:
    """Serve a model over the OpenAI API."""
    from kvasir.cli import serve as command

    command.run(build_settings({"model": model, **options}))
