"""``kvasir serve``: start the engine process, which has the slow imports, and then the HTTP server."""

from __future__ import annotations

import contextlib
import errno
import socket
from importlib.util import find_spec
from pathlib import Path

from kvasir import technique
from kvasir.api.calls import reasoning, tools
from kvasir.api.protocols.responses_journal import check_kind
from kvasir.cli.options import check_output
from kvasir.cli.starting import packaged
from kvasir.client.kv_events import parse
from kvasir.config import ServerConfig, Settings
from kvasir.errors import ConfigError, install, nearest
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.records import check_folder
from kvasir.technique import names

# What vLLM calls cache types; ``engine.codec_choice`` says what they mean.
VLLM_WORDS = {"auto", "fp8_e4m3", "bf16", "bfloat16", "float16", "fp16"}


def run(settings: Settings) -> None:
    """Serve until a signal ends the server. Raises ConfigError when the server cannot start."""
    # Errors of the model, the address and the journal are reported before a process is started.
    build_spec(checkpoint.read_config(checkpoint.resolve(settings.model.model, settings.model.revision)))
    check_codec(settings.cache.kv_codec)
    check_parsers(settings.server)
    check_free(settings.server)
    if settings.server.otlp_traces_endpoint and find_spec("opentelemetry.exporter") is None:
        raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry. Install it: {install('otel')}")
    if settings.service.kv_events_config:
        parse(settings.service.kv_events_config)
    if settings.service.journal:
        check_kind(Path(settings.service.journal))
        check_output(Path(settings.service.journal))
    if settings.service.crash_dumps:
        check_folder(settings.service.crash_dumps, "--crash-dumps")
    settings = name_tenants(settings)
    from kvasir.cluster.cluster_client import open_client

    if note := packaged(settings.model.model, "kvasir serve"):
        log.info(note)
    log.info("loading %s", settings.model.model or "the packaged model")
    client = open_client(settings)
    client.start_process()  # torch loads there while FastAPI loads here
    from kvasir.api.server import serve

    serve(settings, client)


def check_codec(spec: str) -> None:
    """Raise ConfigError for a codec that no file of the package, no plugin and no word of vLLM's names. The engine,
    which has torch, checks the rest."""
    name = spec.partition(":")[0].strip()
    known = names("kvasir.kv.codecs")
    if name not in known and name not in VLLM_WORDS and not name.endswith(".py"):
        variant = next((f" Did you mean '{k}'?" for k in known if name.startswith(k)), "")
        hint = nearest(name, known) or variant
        raise ConfigError(f"there is no kv_codec '{name}'; there are {', '.join(known)}.{hint}")


def check_parsers(server: ServerConfig) -> None:
    """Raise ConfigError for a format of tool calls or of reasoning that nothing reads."""
    for flag, name, package, base in (
        ("--tool-call-parser", server.tool_call_parser, tools.PACKAGE, tools.ToolParser),
        ("--reasoning-parser", server.reasoning_parser, reasoning.PACKAGE, reasoning.ReasoningParser),
    ):
        if name in ("auto", "none"):
            continue
        try:
            technique.find_also(package, name, base)
        except ConfigError as e:
            raise ConfigError(
                f"{flag}: {e} Without the flag, the chat template decides; {flag} none leaves answers as they are."
            ) from e


def name_tenants(settings: Settings) -> Settings:
    """The settings with the names of tenants in ``learn_tenants`` instead of API keys, which the engine must not see.
    Raises ConfigError, which names no key."""
    given, keys = settings.speculation.learn_tenants, settings.server.api_key
    if not given or given == ("all",):
        return settings
    from kvasir.api.http.auth import name_of

    if odd := [i for i, text in enumerate(given, start=1) if text not in keys]:
        raise ConfigError(
            f"learn_tenants: entry {odd[0]} is no key that an --api-key gives. Name one of those, or all."
        )
    # All requests belong to one tenant if there is one key.
    return settings.replace(learn_tenants=tuple(map(name_of, given)) if len(keys) > 1 else ("all",))


def check_free(server: ServerConfig) -> None:
    """Raise ConfigError when the server could not listen on its address."""
    try:
        if server.uds:
            return _check_socket(Path(server.uds))
        families = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = families[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except OSError as e:
        if server.uds:
            raise ConfigError(f"cannot listen on --uds {server.uds}: {e.strerror or e}. Choose another path.") from e
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {e.strerror or e}. Choose another address with --port "
            "(0 picks a free one) or --host."
        ) from e


def _check_socket(path: Path) -> None:
    """Raise OSError when no Unix socket can be made at ``path``. A socket that nobody listens on may be replaced."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as s:
        try:
            s.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():
                raise FileExistsError(errno.EEXIST, "there is a file that is not a socket") from None
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")
