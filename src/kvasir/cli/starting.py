"""The note that a command gives before a packaged model loads."""

from __future__ import annotations

from kvasir.models import checkpoint


def packaged(model: str, command: str) -> str:
    """Return the line that says that a packaged model answers and how to use a larger one; "" for other models."""
    if model not in ("", "embedded") and model not in checkpoint.shipped():
        return ""
    name = checkpoint.resolve(model).name
    return (
        f"the small packaged model '{name}' answers: it knows modular sums and little stories. For a real model: "
        f"{command} PATH (a folder, a GGUF file or a hub id)"
    )
