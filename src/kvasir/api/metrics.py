"""Prometheus metrics: ``kvasir:`` names, and the vLLM names that existing dashboards know.

A registry of its own keeps what the server measures (times, statuses). The engine's counters are read from its latest
statistics when somebody scrapes. The alias of a metric carries the same samples under the other name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics_core import Sample

from kvasir import __version__
from kvasir.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
)
LONG = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5)) + (10**6,)

# Names of vLLM's metrics that carry the samples of ours.
ALIASES = {
    "kvasir:num_requests_running": ["vllm:num_requests_running"],
    "kvasir:num_requests_waiting": ["vllm:num_requests_waiting"],
    "kvasir:kv_cache_usage": ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    "kvasir:preemptions": ["vllm:num_preemptions"],
    "kvasir:prompt_tokens": ["vllm:prompt_tokens"],
    "kvasir:generation_tokens": ["vllm:generation_tokens"],
    "kvasir:prefix_query_tokens": ["vllm:prefix_cache_queries"],
    "kvasir:cached_tokens": ["vllm:prefix_cache_hits"],
    "kvasir:drafts": ["vllm:spec_decode_num_drafts"],
    "kvasir:draft_tokens": ["vllm:spec_decode_num_draft_tokens"],
    "kvasir:accepted_draft_tokens": ["vllm:spec_decode_num_accepted_tokens"],
    "kvasir:accepted_draft_tokens_per_depth": ["vllm:spec_decode_num_accepted_tokens_per_pos"],
    "kvasir:time_to_first_token_seconds": ["vllm:time_to_first_token_seconds"],
    "kvasir:inter_token_seconds": ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
    "kvasir:request_seconds": ["vllm:e2e_request_latency_seconds"],
    "kvasir:queue_seconds": ["vllm:request_queue_time_seconds"],
    "kvasir:prefill_seconds": ["vllm:request_prefill_time_seconds"],
    "kvasir:decode_seconds": ["vllm:request_decode_time_seconds"],
    "kvasir:choice_prompt_tokens": ["vllm:request_prompt_tokens"],
    "kvasir:choice_generation_tokens": ["vllm:request_generation_tokens"],
    "kvasir:request_max_generation_tokens": ["vllm:request_max_num_generation_tokens"],
    "kvasir:choices_finished": ["vllm:request_success"],
}


class Metrics:
    """The server's own measurements. ``render`` adds the engine's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival of a request to its first token", LONG
        )
        self.inter_token = self._histogram("inter_token_seconds", "Between two tokens of one choice", SHORT)
        self.request_time = self._histogram(
            "request_seconds", "From arrival of a request to its end, however it ended", LONG
        )
        self.queue_time = self._histogram(
            "queue_seconds", "From arrival of a request to its first rows in a step", LONG
        )
        self.prefill_time = self._histogram(
            "prefill_seconds", "From a request's first rows in a step to its first token", LONG
        )
        self.max_generated = self._histogram(
            "request_max_generation_tokens", "Tokens of the longest choice of a request", TOKENS
        )
        self._decode_time = self._histogram(
            "decode_seconds", "From the first token of a finished choice to its last", LONG
        )
        self._prompt = self._histogram("choice_prompt_tokens", "Prompt tokens of a finished choice", TOKENS)
        self._generated = self._histogram("choice_generation_tokens", "Tokens generated for a finished choice", TOKENS)
        self._http = self._counter("http_requests", "HTTP requests by route and status", "route", "status")
        self._ended = self._counter("requests_ended", "Generation requests by how they ended", "reason")
        self._finished = self._counter("choices_finished", "Choices by finish reason", "finished_reason")

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"kvasir:{name}", text, buckets=tuple(buckets), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvasir:{name}", text, labels, registry=self.registry)

    def http(self, route: str, status: int) -> None:
        """Count an HTTP reply."""
        self._http.labels(route, str(status)).inc()

    def ended(self, reason: str, seconds: float) -> None:
        """Count a generation request that has ended. ``seconds``: since it arrived."""
        self._ended.labels(reason).inc()
        self.request_time.observe(seconds)

    def finished(self, reason: str, num_prompt: int, num_generated: int, seconds: float | None) -> None:
        """Count a choice that has finished. ``seconds``: from its first token to its last; None if it has none."""
        self._finished.labels(reason).inc()
        self._prompt.observe(num_prompt)
        self._generated.observe(num_generated)
        if seconds is not None:
            self._decode_time.observe(seconds)

    def render(self, stats: EngineStats | None, model: str) -> bytes:
        """The page for /metrics. ``stats`` is None until the engine runs.
        vLLM's names carry its label ``model_name``."""
        page = CollectorRegistry()
        page.register(_Page(lambda: _with_aliases([*self.registry.collect(), *_engine(stats)], model)))
        return generate_latest(page)


class _Page:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def _with_aliases(metrics: Iterable[Metric], model: str) -> Iterator[Metric]:
    for metric in metrics:
        metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
        yield metric
        for alias in ALIASES.get(metric.name, ()):
            copy = Metric(alias, f"Alias of {metric.name}", metric.type)
            copy.samples = [
                Sample(alias + s.name.removeprefix(metric.name), {**s.labels, "model_name": model}, s.value)
                for s in metric.samples
            ]
            yield copy


def _engine(stats: EngineStats | None) -> Iterator[Metric]:
    build = GaugeMetricFamily("kvasir:build_info", "Version of the server", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    if stats is None:
        return
    used = stats.num_pages - stats.num_free_pages
    gauges = {
        "num_requests_running": (stats.num_running, "Sequences that hold pages and a seat"),
        "num_requests_waiting": (stats.num_waiting, "Sequences in the queue"),
        "num_requests_blocked": (stats.num_blocked, "Sequences that wait for something outside the scheduler"),
        "pages_total": (stats.num_pages, "Pages in the KV pool"),
        "pages_free": (stats.num_free_pages, "Pages that a new sequence could take"),
        "pages_cached": (stats.num_cached_pages, "Pages that the prefix cache remembers"),
        "kv_cache_usage": (used / stats.num_pages if stats.num_pages else 0.0, "Share of the pages in use, 0 to 1"),
        "step_seconds": (stats.step_seconds, "Duration of the last step"),
        "step_rows": (stats.step_rows, "Rows of the last step"),
        "weight_bytes": (
            stats.weight_bytes,
            "Bytes of weights that the start read and copied, in startup_seconds of phase fill",
        ),
    }
    if stats.forwards:
        gauges["tokens_per_forward"] = (
            stats.generation_tokens / stats.forwards,
            "Tokens generated per step of a single sequence, since the start",
        )
    if stats.draft_saved_seconds is not None:
        gauges["draft_saved_seconds"] = (
            stats.draft_saved_seconds,
            "Time saved by drafts since the start, below 0 if lost: the predicted time of plain steps "
            "for the same tokens, less the time of the drafted steps",
        )
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(f"kvasir:{name}", text, value)
    counters = {
        "steps": (stats.step, "Steps"),
        "prompt_tokens": (stats.prompt_tokens, "Prompt tokens computed or found in the cache"),
        "generation_tokens": (stats.generation_tokens, "Tokens generated"),
        "forwards": (stats.forwards, "Steps of single sequences that generated tokens; one per token without drafts"),
        "forced_tokens": (stats.forced_tokens, "Generated tokens that a grammar forced, several in a step"),
        "cached_tokens": (stats.cached_tokens, "Prompt tokens served from the prefix cache"),
        "prefix_query_tokens": (stats.prefix_queries, "Prompt tokens looked up in the prefix cache"),
        "preemptions": (stats.preemptions, "Sequences that gave their pages back and start over"),
        "engine_restarts": (stats.restarts, "Engine processes that died or hung and were replaced"),
        "requests_quarantined": (
            stats.quarantined,
            "Requests that were failed because the engine process kept dying on them",
        ),
        "drafts": (stats.drafts, "Drafts verified; each gives its accepted tokens and one more"),
        "draft_tokens": (stats.drafted_tokens, "Draft tokens verified"),
        "accepted_draft_tokens": (stats.accepted_tokens, "Draft tokens accepted"),
    }
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(f"kvasir:{name}", text, value)
    failed = CounterMetricFamily(
        "kvasir:requests_failed", "Requests that the engine failed, by reason", labels=["reason"]
    )
    for reason, count in stats.failed.items():
        failed.add_metric([reason], count)
    yield failed
    error = GaugeMetricFamily(
        "kvasir:step_time_relative_error", "Recent mean of |predicted - measured| / measured", labels=["kind"]
    )
    for kind, value in stats.step_time_error.items():
        error.add_metric([kind], value)
    yield error
    accepted = CounterMetricFamily(
        "kvasir:accepted_draft_tokens_per_depth",
        "Draft tokens accepted, by place in the draft",
        labels=["position"],
    )
    for depth, (_, right) in enumerate(stats.accepted_by_depth):
        accepted.add_metric([str(depth)], right)
    yield accepted
    crossed = CounterMetricFamily(
        "kvasir:draft_tokens_by_drafter_and_depth",
        "Draft tokens verified whose parent was accepted, by drafter, place in the draft, and whether they were "
        "accepted; several at one place count once",
        labels=["drafter", "position", "right"],
    )
    for drafter, depths in stats.drafted_by_depth.items():
        for depth, (tried, right) in enumerate(depths):
            crossed.add_metric([drafter, str(depth), "yes"], right)
            crossed.add_metric([drafter, str(depth), "no"], tried - right)
    yield crossed
    drafted = CounterMetricFamily(
        "kvasir:draft_tokens_by_drafter",
        "Draft tokens verified, by drafter and whether they were accepted",
        labels=["drafter", "right"],
    )
    for drafter, (count, right) in stats.drafted_by.items():
        drafted.add_metric([drafter, "yes"], right)
        drafted.add_metric([drafter, "no"], count - right)
    yield drafted
    startup = GaugeMetricFamily("kvasir:startup_seconds", "Start-up time by phase", labels=["phase"])
    for phase, seconds in stats.startup.items():
        startup.add_metric([phase], seconds)
    yield startup
