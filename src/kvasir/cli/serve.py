"""``kvasir serve``: start the engine process first (it has the slow imports), then the HTTP server beside it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from kvasir.config import ServerConfig, Settings
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.families import build_spec


def run(settings: Settings) -> None:
    # What is wrong with the model or the address is said before a process is started for it.
    build_spec(checkpoint.read_config(checkpoint.resolve(settings.model.model, settings.model.revision)))
    check_free(settings.server)
    from kvasir.engine.client import AsyncEngine

    client = AsyncEngine(settings)
    client.start_process()  # torch loads there while FastAPI loads here
    from kvasir.api.server import serve

    serve(settings, client)


def check_free(server: ServerConfig) -> None:
    """Raise ConfigError when the address cannot be listened on."""
    try:
        if server.uds:
            if not Path(server.uds).parent.is_dir():
                raise FileNotFoundError(2, "its folder does not exist")
            return
        families = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = families[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except OSError as e:
        where = f"--uds {server.uds}" if server.uds else f"{server.host}:{server.port}"
        raise ConfigError(f"cannot listen on {where}: {e.strerror or e}. Choose another with --port (0 picks a free one) or --host.") from e
