"""``kvasir serve``: start the engine process first (it has the slow imports), then the HTTP server beside it."""

from __future__ import annotations

from kvasir.config import Settings


def run(settings: Settings) -> None:
    from kvasir.engine.client import AsyncEngine

    client = AsyncEngine(settings)
    client.start_process()  # torch loads there while FastAPI loads here
    from kvasir.api.server import serve

    serve(settings, client)
