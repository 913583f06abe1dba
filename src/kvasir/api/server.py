"""The HTTP server: the app with its routes, key guard and error replies, and its life from bound port to drained exit.

Never imports torch: the model lives in the engine process. ``kvasir serve`` starts that process first and imports this
module while the model loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kvasir import __version__
from kvasir.api.admin import routes_playground as playground
from kvasir.api.admin.routes_adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from kvasir.api.admin.routes_admin import AdminRoutes
from kvasir.api.admin.routes_status import DetokenizeBody, StatusRoutes, TokenizeBody
from kvasir.api.http.auth import OPEN_PATHS, PUBLIC_METRICS, KeyGuard
from kvasir.api.http.body import Body
from kvasir.api.http.connections import MAX_HEAD_BYTES, Protocol, Server, raise_file_limit
from kvasir.api.http.errors import error_response
from kvasir.api.http.hosts import HostGuard, names_of
from kvasir.api.http.log_stats import LogStats
from kvasir.api.http.memory import limit_allocator
from kvasir.api.http.middleware import HeadAsGet, Preflights
from kvasir.api.http.not_found import explain_method, explain_path, methods_at, served
from kvasir.api.http.service import Service
from kvasir.api.protocols import protocol_pooling
from kvasir.api.protocols.messages_protocol import CountTokensBody, MessagesBody
from kvasir.api.protocols.openai import ChatBody, CompletionBody
from kvasir.api.protocols.protocol_responses import ResponsesBody
from kvasir.api.protocols.routes_completions import CompletionJob
from kvasir.api.protocols.routes_messages import MessagesJob, MessagesRoutes
from kvasir.api.protocols.routes_pooling import EmbeddingsJob, RerankJob, ScoreJob
from kvasir.api.protocols.routes_responses import ResponsesRoutes
from kvasir.api.scaling.routes_scaling import ScalingRoutes, chat_job
from kvasir.api.scaling.run_body import RunBody
from kvasir.api.text.text import Text
from kvasir.client.engine_process import collect_rarely
from kvasir.client.front import Front
from kvasir.client.interface import EngineClient
from kvasir.cluster.cluster_client import open_client
from kvasir.config import ServerConfig, Settings
from kvasir.errors import ConfigError, RequestError, is_bug
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.tokenizer import Tokenizer

# Time that finished replies get to be sent after the engine has stopped.
CLOSE_SECONDS = 5
# Most connections that wait to be accepted.
BACKLOG = 2048
# Seconds between two lines of the log that say that the model still loads.
LOADING_SECONDS = 2.0


def create_app(client: EngineClient, text: Text, settings: ServerConfig, journal: str | None = None) -> FastAPI:
    """Make the app. Its lifespan starts ``client`` and loads ``text`` in the background, and stops ``client`` at the
    end. ``journal``: file that keeps background responses. ``app.state.service`` is the Service."""
    service = Service(client, text, settings)
    if settings.log_stats and settings.log_stats_interval:
        load = LogStats(client.stats, lambda: service.metrics.num_ended, settings.log_stats_interval)
        service.openers.append(load.start)
        service.closers.append(load.stop)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = service.start()
        yield
        await service.stop(0.0)
        await asyncio.gather(starting, return_exceptions=True)
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)

    app = FastAPI(
        title="kvasir", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.service = service
    _add_routes(app, service, ResponsesRoutes(service, journal))
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    # The middleware added last sees a request first: CORS answers preflights, then the watch also counts what the guard
    # refuses. HEAD is turned into GET before the watch, which reads the route from the request's own scope.
    open_paths = OPEN_PATHS.union(playground.files(), PUBLIC_METRICS if settings.public_metrics else ())
    app.add_middleware(KeyGuard, keys=settings.api_key, open_paths=open_paths, admin_key=settings.admin_key)
    app.add_middleware(_Watch, service=service, log_requests=settings.log_requests)
    app.add_middleware(HeadAsGet)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client has headers of its own
            expose_headers=["x-request-id", "request-id", "retry-after", "warning", "x-kvasir-warning"],
        )
    app.add_middleware(Preflights, allowed=settings.allowed_origins)
    app.add_middleware(HostGuard, names=names_of(settings))
    return app


def _add_routes(app: FastAPI, service: Service, responses: ResponsesRoutes) -> None:
    status, scaling = StatusRoutes(service), ScalingRoutes(service)

    def generation(path: str, body: type[Body], job: Callable, summary: str, task: str = "generate") -> None:
        async def route(http: Request) -> Response:
            return await service.respond(http, job, task)

        _post(app, path, route, body, summary)

    generation("/v1/chat/completions", ChatBody, chat_job, "Answer a conversation")
    generation("/v1/completions", CompletionBody, CompletionJob, "Continue a text")
    _post(app, "/v1/responses", responses.create, ResponsesBody, "Answer a conversation (responses API)")
    generation("/v1/messages", MessagesBody, MessagesJob, "Answer a conversation (Anthropic's messages API)")
    messages = MessagesRoutes(service)
    _post(app, "/v1/messages/count_tokens", messages.count_tokens, CountTokensBody, "Count a conversation's tokens")
    generation("/v1/embeddings", protocol_pooling.EmbeddingsBody, EmbeddingsJob, "Embed texts", "embed")
    for path in ("/v1/score", "/score"):
        generation(path, protocol_pooling.ScoreBody, ScoreJob, "Score pairs of texts", "score")
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        generation(path, protocol_pooling.RerankBody, RerankJob, "Order documents by relevance to a query", "score")
    _post(
        app,
        "/v1/scaling/runs",
        scaling.create,
        RunBody,
        "Solve problems with a strategy of test-time scaling, in the background",
    )
    for path, route, methods in (
        ("/v1/scaling/runs/{name}", scaling.status, ["GET"]),
        ("/v1/scaling/runs/{name}/events", scaling.events, ["GET"]),
        ("/v1/scaling/runs/{name}", scaling.cancel, ["DELETE"]),
        ("/v1/responses/{name}", responses.get, ["GET"]),
        ("/v1/responses/{name}", responses.delete, ["DELETE"]),
        ("/v1/responses/{name}/cancel", responses.cancel, ["POST"]),
    ):
        app.add_api_route(path, route, methods=methods, response_class=Response, responses=ERRORS)
    if service.settings.allow_runtime_lora:
        adapters = AdapterRoutes(service)
        _post(app, "/v1/load_lora_adapter", adapters.load, LoadAdapterBody, "Load a LoRA adapter")
        _post(app, "/v1/unload_lora_adapter", adapters.unload, UnloadAdapterBody, "Unload a LoRA adapter")
    if service.settings.admin_key is not None:
        admin = AdminRoutes(service)
        for path, route, methods in (
            ("/admin/replicas", admin.replicas, ["GET"]),
            ("/admin/replicas", admin.add, ["POST"]),
            ("/admin/replicas/{number}", admin.remove, ["DELETE"]),
            ("/admin/replicas/{number}/drain", admin.drain, ["POST"]),
            ("/admin/replicas/{number}/restart", admin.restart, ["POST"]),
        ):
            app.add_api_route(path, route, methods=methods, response_class=Response, responses=ERRORS)
    _post(app, "/tokenize", status.tokenize, TokenizeBody, "Text or messages to token ids")
    _post(app, "/detokenize", status.detokenize, DetokenizeBody, "Token ids to text")
    for path, route in {
        "/v1/models": status.models,
        "/v1/hooks": status.hooks,
        "/v1/models/{name:path}": status.model,
        "/health": status.health,
        "/ping": status.health,
        "/health/live": status.live,
        "/health/ready": status.ready,
        "/version": status.version,
        "/metrics": status.metrics,
        playground.PAGE: playground.playground,
        **({"/tokenizer_info": status.tokenizer_info} if service.settings.enable_tokenizer_info_endpoint else {}),
    }.items():
        app.add_api_route(path, route, methods=["GET"], response_class=Response, responses=ERRORS)
    app.add_api_route("/ping", status.health, methods=["POST"], response_class=Response, responses=ERRORS)
    app.add_api_route(
        playground.FOLDER + "{name:path}", playground.playground, methods=["GET"], include_in_schema=False
    )


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request is refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    },
    "5XX": {
        "description": "The server failed or is not ready",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    },
}
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _post(app: FastAPI, path: str, route: Callable, body: type[Body], summary: str) -> None:
    """Add a route that reads its own body, so that limits hold while reading;
    the schema goes into the OpenAPI document."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    app.add_api_route(
        path,
        route,
        methods=["POST"],
        response_class=Response,
        summary=summary,
        responses=ERRORS,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = (
            ChatBody,
            CompletionBody,
            ResponsesBody,
            MessagesBody,
            CountTokensBody,
            RunBody,
            TokenizeBody,
            DetokenizeBody,
            protocol_pooling.EmbeddingsBody,
            protocol_pooling.ScoreBody,
            protocol_pooling.RerankBody,
        )
        schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
        for body in bodies:
            own = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= own.pop("$defs", {})
            schemas[body.__name__] = own
        schema["components"] = {"schemas": schemas, "securitySchemes": KEYS}
        schema["security"] = [{name: []} for name in KEYS]
        app.openapi_schema = schema
    return app.openapi_schema


class _Watch:
    """ASGI middleware that counts replies by route and status, logs them when asked to (never the query), and turns our
    bugs into a logged 500. All paths without a route count as one, so that labels stay few."""

    def __init__(self, app: Callable, service: Service, log_requests: bool) -> None:
        self.app = app
        self.metrics = service.metrics
        self.log_requests = log_requests

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, arrival = 0, time.monotonic()

        async def watched(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.metrics.http(getattr(scope.get("route"), "path", "none"), status)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except BaseException as e:
            if not is_bug(e):
                raise
            log.exception("bug while serving %s %s", scope["method"], scope["path"])
            if status:
                raise
            bug = RequestError("internal error", status=500, code="internal_error")
            await error_response(bug, scope)(scope, receive, watched)
        finally:
            if self.log_requests:
                log.info("%s %s %d in %.3f s", scope["method"], scope["path"], status, time.monotonic() - arrival)


async def _on_request_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, http.scope)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Answer 404 and 405 of the router with what is served."""
    assert isinstance(error, HTTPException)
    path, routes = http.scope["path"], served(http.app.routes)
    methods = methods_at(path, routes)
    if error.status_code == 405:
        what = RequestError(explain_method(http.method, path, methods), status=405, code="method_not_allowed")
    elif error.status_code == 404:
        what = RequestError(explain_path(path, routes), status=404, code="not_found")
    else:
        what = RequestError(str(error.detail), status=error.status_code)
    response = error_response(what, http.scope)
    response.headers.update({"allow": ", ".join(methods)} if error.status_code == 405 else {})
    return response


# ---------------------------------------------------------------------------------------------------------- the process


def check_address(settings: ServerConfig) -> None:
    """Raise ConfigError when the server would be open to the network without a key."""
    if settings.uds or settings.api_key or settings.insecure or settings.host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"host '{settings.host}' is open to the network, and there is no API key. Pass --api-key KEY, or "
            "--insecure if everybody who reaches this port may use the model, or keep --host 127.0.0.1"
        )


def open_text(settings: Settings) -> Text:
    """Make the text side that the settings describe, without loading anything."""
    source = settings.model

    def open_tokenizer() -> Tokenizer:
        path = checkpoint.resolve(source.tokenizer or source.model, None if source.tokenizer else source.revision)
        return Tokenizer.load(path, source.chat_template)

    return Text(
        open_tokenizer, settings.server.tool_call_parser, settings.server.reasoning_parser, settings.server.processors
    )


def serve(settings: Settings, client: Front | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain: the server is not ready at once, running streams get
    ``drain_timeout`` seconds, the rest is journalled. A second signal ends the drain. Raises ConfigError when the
    server cannot start.

    ``client``: a client whose process was started before this module was imported.
    """
    check_address(settings.server)
    if any(not key.strip() for key in settings.server.api_key):
        raise ConfigError("an API key is empty")
    settings.server.output_limits()  # before the engine process starts
    if settings.model.skip_tokenizer_init:
        raise ConfigError(
            "the server needs the tokenizer: drop --skip-tokenizer-init (it is for LLM(...) with token ids)"
        )
    client = client or open_client(settings)
    asyncio.run(_serve(settings, client))


async def _serve(settings: Settings, client: Front) -> None:
    limit_allocator()
    client.start_process()
    options = settings.server
    app = create_app(client, open_text(settings), options, settings.service.journal)
    service: Service = app.state.service
    files = raise_file_limit()
    # Up to ``backlog`` connections may be accepted at once while as many are closing; the engine process needs some
    # files.
    backlog = min(BACKLOG, files // 8)
    server = Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            uds=options.uds,
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=backlog,
            limit_concurrency=files - 2 * backlog,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )
    stopping: list[asyncio.Task] = []

    def stop() -> None:
        drain = settings.service.drain_timeout if not stopping else 0.0
        stopping.append(asyncio.ensure_future(_drain(service, server, drain)))

    loop = asyncio.get_running_loop()
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal was closed; nohup ignores that
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop)
    announce = asyncio.ensure_future(_announce(service, server))
    try:
        await server.serve()
    except (SystemExit, OSError) as e:  # uvicorn exits when it cannot bind a port, and raises for a Unix socket
        why = "is the port taken?" if isinstance(e, SystemExit) else e.strerror or e
        raise ConfigError(f"cannot listen on {options.uds or f'{options.host}:{options.port}'}: {why}") from e
    finally:
        announce.cancel()
        await asyncio.gather(announce, *stopping, return_exceptions=True)
        await service.stop(0.0)
        for number in signals:
            loop.remove_signal_handler(number)
    if service.failure is not None:
        raise service.failure


async def _drain(service: Service, server: Server, seconds: float) -> None:
    log.info("draining for at most %g s", seconds)
    try:
        await service.stop(seconds)
    finally:
        server.should_exit = True


async def _announce(service: Service, server: Server) -> None:
    """Log where the server listens and when it is ready; end it when the start fails."""
    while not server.started:
        await asyncio.sleep(0.01)
    for listener in server.servers:
        for sock in listener.sockets:
            log.info("listening on %s", _url(sock.getsockname()))
    await _loaded(service)
    if service.phase == "failed":
        server.should_exit = True
    elif service.phase == "ready":
        # A collection that visits FastAPI, the routes and the vocabulary would stop every stream for tens of
        # milliseconds.
        collect_rarely()
        log.info("ready to serve %s", service.info.name)


async def _loaded(service: Service) -> None:
    """Wait for the engine, and say now and then that it still loads."""
    began = asyncio.get_running_loop().time()
    started = asyncio.ensure_future(service.started())
    try:
        while not (await asyncio.wait({started}, timeout=LOADING_SECONDS))[0]:
            log.info("loading the model: %.0f s so far", asyncio.get_running_loop().time() - began)
        await started
    finally:
        started.cancel()


def _url(address: Any) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"
