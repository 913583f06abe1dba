"""The page of ``/metrics``: what the server measures itself, and the engine's statistics at the time of the scrape.

Both follow `metric_definitions`. The alias of a metric carries the same samples under vLLM's name, for dashboards that
exist.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics_core import Sample
from prometheus_client.utils import floatToGoString

from kvasir import __version__
from kvasir.api.http.metric_definitions import BY_NAME, DEFINITIONS, Definition
from kvasir.types import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Names of vLLM's metrics that carry the samples of ours.
ALIASES = {f"kvasir:{d.name}": [f"vllm:{name}" for name in d.vllm] for d in DEFINITIONS if d.vllm}


class TokenHistogram:
    """A histogram that is filled once a token by one thread. It adds to a list; prometheus' own takes a lock for the
    bucket, one for the sum, and walks through the bounds, which is a tenth of what the server does for a token."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = [*bounds, float("inf")]
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram, as the registry asks for it."""
        buckets = list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The server's own measurements. ``render`` adds the engine's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._histogram("time_to_first_token_seconds")
        found = BY_NAME["inter_token_seconds"]
        self.inter_token = TokenHistogram(f"kvasir:{found.name}", found.text, found.buckets)
        self.registry.register(self.inter_token)
        self.request_time = self._histogram("request_seconds")
        self.queue_time = self._histogram("queue_seconds")
        self.prefill_time = self._histogram("prefill_seconds")
        self.max_generated = self._histogram("request_max_generation_tokens")
        self._decode_time = self._histogram("decode_seconds")
        self._prompt = self._histogram("choice_prompt_tokens")
        self._generated = self._histogram("choice_generation_tokens")
        self.num_ended = 0  # generation requests
        self._http = self._counter("http_requests")
        self._ended = self._counter("requests_ended")
        self._finished = self._counter("choices_finished")

    def _histogram(self, name: str) -> Histogram:
        found = BY_NAME[name]
        return Histogram(f"kvasir:{name}", found.text, buckets=found.buckets, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        found = BY_NAME[name]
        return Counter(f"kvasir:{name}", found.text, found.labels, registry=self.registry)

    def http(self, route: str, status: int) -> None:
        """Count an HTTP reply."""
        self._http.labels(route, str(status)).inc()

    def ended(self, reason: str, seconds: float) -> None:
        """Count a generation request that has ended. ``seconds``: since it arrived."""
        self.num_ended += 1
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
    if stats is not None:
        for definition in DEFINITIONS:
            if definition.read is not None and (family := _family(definition, stats)) is not None:
                yield family


def _family(definition: Definition, stats: EngineStats) -> Metric | None:
    """The samples of one metric of the engine, or None while it is not known."""
    samples = definition.read(stats)  # type: ignore[misc]
    if samples is None:
        return None
    kind = GaugeMetricFamily if definition.kind == "gauge" else CounterMetricFamily
    family = kind(f"kvasir:{definition.name}", definition.text, labels=definition.labels)
    for values, number in [((), samples)] if isinstance(samples, int | float) else samples:
        family.add_metric(values, number)
    return family
