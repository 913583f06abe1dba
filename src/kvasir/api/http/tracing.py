"""Traces of requests for OpenTelemetry: a span of the request, and spans of its queue, prefill and decode.

Attributes have the names of the GenAI semantic conventions (opentelemetry.io/docs/specs/semconv/gen-ai), and are
numbers, names of models and reasons of an end. No prompt, answer, stop text or tool ever gets into a span. A client's
``traceparent`` header makes the request's span a child of the client's. This module imports OpenTelemetry only when a
``Tracer`` is made, so it costs nothing when traces are off. The spans of a request are made when it has ended, and a
thread of the SDK sends them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HttpRequest

from kvasir import __version__
from kvasir.api.http.generation import Generation, Running
from kvasir.errors import ConfigError, RequestError, install

# Name of the operation by route. Any other route gives it its last word, e.g. "rerank".
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
PROVIDER = "kvasir"


class Tracer:
    """Sends spans to ``endpoint`` by OTLP over HTTP. The SDK's own variables (``OTEL_SERVICE_NAME``,
    ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ...) hold.

    Raises ConfigError where the extra is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as e:
            raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry ({e}). Install it: {install('otel')}") from e
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        service = {"service.version": __version__} | ({} if named else {"service.name": "kvasir"})
        self._api, self._propagator = trace, TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("kvasir", __version__)

    def begin(self, http: HttpRequest, arrival: float) -> Trace:
        """Begin the trace of a request that came at ``arrival`` (``time.monotonic()``)."""
        # Names of HTTP headers have any case; the propagator asks for these two in lower case.
        headers = {name: http.headers[name] for name in ("traceparent", "tracestate") if name in http.headers}
        return Trace(self, self._propagator.extract(headers), http.scope["path"], arrival)

    def span(
        self,
        name: str,
        parent: Any,
        times: tuple[int, int],
        attributes: dict[str, Any],
        *,
        server: bool = False,
        failed: bool = False,
    ) -> Any:
        """Make a span that has ended, and return the context for its children. ``times``: nanoseconds since 1970.
        ``server``: it is the answer to a remote call."""
        kind = self._api.SpanKind.SERVER if server else self._api.SpanKind.INTERNAL
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=times[0])
        if failed:
            span.set_status(self._api.StatusCode.ERROR)
        context = self._api.set_span_in_context(span)
        span.end(times[1])
        return context

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""
        self._provider.shutdown()


class Trace:
    """The trace of one request. ``end`` or ``refuse`` is called once it has ended; a second call does nothing."""

    def __init__(self, tracer: Tracer, parent: Any, path: str, arrival: float) -> None:
        self._tracer: Tracer | None = tracer
        self._parent, self._arrival = parent, arrival
        self._operation = OPERATIONS.get(path, path.rstrip("/").rpartition("/")[2])
        self._offset = time.time_ns() - round(time.monotonic() * 1e9)  # from this clock to that of spans
        self.model = ""
        self.stream = False
        self.work: Any = None  # the request's work, once it has begun

    def begin(self, work: Any, model: str, stream: bool) -> None:
        """Note the work that was begun for the request, before anything of it can end."""
        self.work, self.model, self.stream = work, model, stream

    def refuse(self, error: RequestError) -> None:
        """End the trace of a request that was refused before its work began."""
        self._finish({"error.type": error.code or str(error.status)}, failed=error.status >= 500)

    def end(self) -> None:
        """End the trace of a request whose work is closed."""
        work = self.work
        if not isinstance(work, Generation):
            return self._finish({})
        attributes = _of(work)
        if work.outcome != "finished":
            attributes["error.type"] = work.outcome  # "disconnected", or the code of an error
        first = min((r.first for r in work.running if r.first is not None), default=None)
        if first is not None and self.stream:
            attributes["gen_ai.response.time_to_first_chunk"] = first - self._arrival
        self._finish(attributes, work.running, failed=work.outcome not in ("finished", "disconnected"))

    def _finish(self, attributes: dict[str, Any], running: Iterable[Running] = (), failed: bool = False) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        known: dict[str, Any] = {"gen_ai.operation.name": self._operation, "gen_ai.provider.name": PROVIDER}
        if self.model:
            known |= {"gen_ai.request.model": self.model, "gen_ai.response.model": self.model}
        if self.stream:
            known["gen_ai.request.stream"] = True
        name = f"{self._operation} {self.model}".strip()
        times = self._times(self._arrival, time.monotonic())
        context = tracer.span(name, self._parent, times, {**known, **attributes}, server=True, failed=failed)
        for r in running:
            for phase, start, end, facts in _phases(r):
                tracer.span(phase, context, self._times(start, end), facts)

    def _times(self, start: float, end: float) -> tuple[int, int]:
        return round(start * 1e9) + self._offset, round(end * 1e9) + self._offset


def _of(work: Generation) -> dict[str, Any]:
    """Attributes of the request's span."""
    request, usage = work.running[0].request, work.usage
    params = request.params
    many = len(work.running) > 1
    found: dict[str, Any] = {
        "gen_ai.response.id": request.id.rpartition(".")[0] if many else request.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
    }
    if usage.reasoning:
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning
    if params.top_k > 0:
        found["gen_ai.request.top_k"] = params.top_k
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(params, name):
            found[f"gen_ai.request.{name}"] = getattr(params, name)
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    if params.n > 1:
        found["gen_ai.request.choice.count"] = params.n
    reasons = [branch.finish_reason for r in work.running for branch in r.branches if branch.finish_reason is not None]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    return found


def _phases(r: Running) -> list[tuple[str, float, float, dict[str, Any]]]:
    """Name, start, end and attributes of the phases of one prompt, as far as it came."""
    arrival, prompt = r.request.arrival, len(r.request.prompt_ids)
    if r.first is None or r.queued is None:
        return []
    scheduled = min(arrival + r.queued, r.first)
    last = max((branch.last for branch in r.branches if branch.last is not None), default=r.first)
    made = sum(branch.num_tokens for branch in r.branches)
    return [
        ("queue", arrival, scheduled, {}),
        ("prefill", scheduled, r.first, {"gen_ai.usage.input_tokens": prompt, "kvasir.cached_tokens": r.cached}),
        ("decode", r.first, last, {"gen_ai.usage.output_tokens": made}),
    ]
