"""The metrics of a server as data: names, help, labels, vLLM's names, and what a dashboard and an alert make of them.

``/metrics``, the Grafana dashboard and the alert rules (``python -m tools.monitoring``) are made from this table, so
they cannot disagree. Names carry the prefix ``kvasir:`` in Prometheus, and counters end in ``_total`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvasir.types import EngineStats, LearnStats

# Upper bounds of buckets: seconds between tokens, seconds of a request, and numbers of tokens.
# fmt: off
SHORT = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.0, 5.0,
)
LONG = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
        640.0)
# fmt: on
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5)) + (1e6,)

# Sections of the dashboard, in order.
Section = Literal["Load", "Latency", "Tokens", "Cache", "Drafts", "Engine"]
# A metric's samples: one number (None: not known), or label values with their number.
Samples = float | None | Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule of Prometheus. ``expr``: {name} stands for the metric's name there, with ``_total`` or ``_bucket``.
    ``hold``: how long it must be true."""

    name: str
    expr: str
    hold: str
    severity: Literal["warning", "critical"]
    summary: str


@dataclass(frozen=True, slots=True)
class Definition:
    """A metric. ``read`` gets its samples from the engine's statistics; None: the server measures it itself.
    ``unit``: Grafana's word for the unit of the number, or of a second's increase of a counter."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    section: Section
    read: Callable[[EngineStats], Samples] | None = None
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = "short"
    vllm: tuple[str, ...] = ()
    alert: Alert | None = None

    @property
    def prometheus(self) -> str:
        """The name of its samples in Prometheus."""
        suffix = {"gauge": "", "counter": "_total", "histogram": "_bucket"}[self.kind]
        return f"kvasir:{self.name}{suffix}"


def _gauge(
    name: str, section: Section, read: Callable[[EngineStats], Samples], text: str, **more: object
) -> Definition:
    return Definition(name, "gauge", text, section, read, **more)  # type: ignore[arg-type]


def _counter(
    name: str, section: Section, read: Callable[[EngineStats], Samples] | None, text: str, **more: object
) -> Definition:
    return Definition(name, "counter", text, section, read, **more)  # type: ignore[arg-type]


def _histogram(name: str, section: Section, buckets: tuple[float, ...], text: str, **more: object) -> Definition:
    return Definition(name, "histogram", text, section, buckets=buckets, **more)  # type: ignore[arg-type]


def _usage(s: EngineStats) -> float:
    return (s.num_pages - s.num_free_pages) / s.num_pages if s.num_pages else 0.0


def _by_drafter(s: EngineStats) -> Samples:
    for drafter, (count, right) in s.drafted_by.items():
        yield (drafter, "yes"), right
        yield (drafter, "no"), count - right


def _by_drafter_and_depth(s: EngineStats) -> Samples:
    for drafter, depths in s.drafted_by_depth.items():
        for depth, (tried, right) in enumerate(depths):
            yield (drafter, str(depth), "yes"), right
            yield (drafter, str(depth), "no"), tried - right


def _singles(values: dict[str, float] | dict[str, int]) -> Samples:
    return [((name,), value) for name, value in values.items()]


def _each(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Samples]:
    """A metric of each replica, or None where there is one engine."""
    return lambda s: [((str(number),), read(one)) for number, one in s.by_replica.items()] or None


def _learners(s: EngineStats) -> list[tuple[str, LearnStats]]:
    """Statistics of each drafter that learns, by the number of its replica; one engine is replica 0."""
    return [(str(number), one.learning) for number, one in (s.by_replica or {0: s}).items() if one.learning]


def _learned(name: str) -> Callable[[EngineStats], Samples]:
    return lambda s: [((replica,), getattr(learner, name)) for replica, learner in _learners(s)] or None


def _kl(s: EngineStats) -> Samples:
    return [((replica, str(i)), kl) for replica, it in _learners(s) for i, kl in enumerate(it.kl_by_depth)] or None


DEFINITIONS = (
    # ------------------------------------------------------------------------------------------------------------ load
    _gauge(
        "num_requests_running",
        "Load",
        lambda s: s.num_running,
        "Sequences that hold pages and a seat",
        vllm=("num_requests_running",),
    ),
    _gauge(
        "num_requests_waiting",
        "Load",
        lambda s: s.num_waiting,
        "Sequences in the queue",
        vllm=("num_requests_waiting",),
        alert=Alert(
            "KvasirQueueStands",
            "min_over_time({name}[10m]) > 0",
            "0m",
            "warning",
            "Requests have waited without a pause for ten minutes: the server gets more than it can do.",
        ),
    ),
    _gauge(
        "queued_seconds",
        "Load",
        lambda s: s.queued_seconds,
        "Time to compute the prompts that wait, over all replicas: scale by it",
        unit="s",
    ),
    *(
        make(f"replica_{name}", "Load", _each(read), text, labels=("replica",))  # type: ignore[operator]
        for make, name, read, text in (
            (_gauge, "requests_running", lambda s: s.num_running, "Sequences that run in each replica"),
            (_gauge, "requests_waiting", lambda s: s.num_waiting, "Sequences in the queue of each replica"),
            (_counter, "prompt_tokens", lambda s: s.prompt_tokens, "Prompt tokens that each replica has computed"),
            (_counter, "generation_tokens", lambda s: s.generation_tokens, "Tokens that each replica has generated"),
        )
    ),
    _gauge(
        "replica_kv_cache_usage",
        "Cache",
        _each(_usage),
        "Share of each replica's pages that are in use",
        labels=("replica",),
        unit="percentunit",
    ),
    _counter(
        "replica_restarts",
        "Engine",
        _each(lambda s: s.restarts),
        "Restarts of each replica's process that nobody asked for",
        labels=("replica",),
    ),
    _gauge(
        "num_requests_blocked",
        "Load",
        lambda s: s.num_blocked,
        "Sequences that wait for something outside the scheduler",
    ),
    _counter(
        "http_requests",
        "Load",
        None,
        "HTTP requests by route and status",
        labels=("route", "status"),
        alert=Alert(
            "KvasirServerErrors",
            'sum by (instance) (rate({name}{{status=~"5.."}}[5m])) > 0.01 * sum by (instance) (rate({name}[5m]))',
            "5m",
            "critical",
            "More than 1 % of HTTP requests fail with a 5xx.",
        ),
    ),
    _counter("requests_ended", "Load", None, "Generation requests by how they ended", labels=("reason",)),
    _counter(
        "choices_finished",
        "Load",
        None,
        "Choices by finish reason",
        labels=("finished_reason",),
        vllm=("request_success",),
    ),
    # --------------------------------------------------------------------------------------------------------- latency
    _histogram(
        "time_to_first_token_seconds",
        "Latency",
        LONG,
        "From arrival of a request to its first token",
        unit="s",
        vllm=("time_to_first_token_seconds",),
        alert=Alert(
            "KvasirSlowFirstToken",
            "histogram_quantile(0.95, sum by (instance, le) (rate({name}[5m]))) > 10",
            "10m",
            "warning",
            "One request in twenty waits more than 10 s for its first token.",
        ),
    ),
    _histogram(
        "inter_token_seconds",
        "Latency",
        SHORT,
        "Between two tokens of one choice",
        unit="s",
        vllm=("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    _histogram(
        "request_seconds",
        "Latency",
        LONG,
        "From arrival of a request to its end, however it ended",
        unit="s",
        vllm=("e2e_request_latency_seconds",),
    ),
    _histogram(
        "queue_seconds",
        "Latency",
        LONG,
        "From arrival of a request to its first rows in a step",
        unit="s",
        vllm=("request_queue_time_seconds",),
    ),
    _histogram(
        "prefill_seconds",
        "Latency",
        LONG,
        "From a request's first rows in a step to its first token",
        unit="s",
        vllm=("request_prefill_time_seconds",),
    ),
    _histogram(
        "decode_seconds",
        "Latency",
        LONG,
        "From the first token of a finished choice to its last",
        unit="s",
        vllm=("request_decode_time_seconds",),
    ),
    # ---------------------------------------------------------------------------------------------------------- tokens
    _counter(
        "prompt_tokens",
        "Tokens",
        lambda s: s.prompt_tokens,
        "Prompt tokens computed or found in the cache",
        vllm=("prompt_tokens",),
    ),
    _counter(
        "generation_tokens",
        "Tokens",
        lambda s: s.generation_tokens,
        "Tokens generated",
        vllm=("generation_tokens",),
    ),
    _histogram(
        "choice_prompt_tokens",
        "Tokens",
        TOKENS,
        "Prompt tokens of a finished choice",
        vllm=("request_prompt_tokens",),
    ),
    _histogram(
        "choice_generation_tokens",
        "Tokens",
        TOKENS,
        "Tokens generated for a finished choice",
        vllm=("request_generation_tokens",),
    ),
    _histogram(
        "request_max_generation_tokens",
        "Tokens",
        TOKENS,
        "Tokens of the longest choice of a request",
        vllm=("request_max_num_generation_tokens",),
    ),
    # ----------------------------------------------------------------------------------------------------------- cache
    _gauge(
        "kv_cache_usage",
        "Cache",
        _usage,
        "Share of the pages in use, 0 to 1",
        unit="percentunit",
        vllm=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    _gauge("num_pages", "Cache", lambda s: s.num_pages, "Pages in the KV pool"),
    _gauge("pages_free", "Cache", lambda s: s.num_free_pages, "Pages that a new sequence could take"),
    _gauge("pages_cached", "Cache", lambda s: s.num_cached_pages, "Pages that the prefix cache remembers"),
    _counter(
        "prefix_query_tokens",
        "Cache",
        lambda s: s.prefix_queries,
        "Prompt tokens looked up in the prefix cache",
        vllm=("prefix_cache_queries",),
    ),
    _counter(
        "cached_tokens",
        "Cache",
        lambda s: s.cached_tokens,
        "Prompt tokens served from the prefix cache",
        vllm=("prefix_cache_hits",),
    ),
    _counter(
        "preemptions",
        "Cache",
        lambda s: s.preemptions,
        "Sequences that gave their pages back and start over",
        vllm=("num_preemptions",),
        alert=Alert(
            "KvasirPreempts",
            "rate({name}[5m]) > 0.2",
            "10m",
            "warning",
            "Sequences keep losing their pages: fewer at once (--max-num-seqs) or a larger pool would be faster.",
        ),
    ),
    # ---------------------------------------------------------------------------------------------------------- drafts
    _counter(
        "drafts",
        "Drafts",
        lambda s: s.drafts,
        "Drafts verified; each gives its accepted tokens and one more",
        vllm=("spec_decode_num_drafts",),
    ),
    _counter(
        "draft_tokens",
        "Drafts",
        lambda s: s.drafted_tokens,
        "Draft tokens verified",
        vllm=("spec_decode_num_draft_tokens",),
    ),
    _counter(
        "accepted_draft_tokens",
        "Drafts",
        lambda s: s.accepted_tokens,
        "Draft tokens accepted",
        vllm=("spec_decode_num_accepted_tokens",),
    ),
    _counter(
        "accepted_draft_tokens_per_depth",
        "Drafts",
        lambda s: [((str(depth),), right) for depth, (_, right) in enumerate(s.accepted_by_depth)],
        "Draft tokens accepted, by place in the draft",
        labels=("position",),
        vllm=("spec_decode_num_accepted_tokens_per_pos",),
    ),
    _counter(
        "draft_tokens_by_drafter",
        "Drafts",
        _by_drafter,
        "Draft tokens verified, by drafter and whether they were accepted",
        labels=("drafter", "right"),
    ),
    _counter(
        "draft_tokens_by_drafter_and_depth",
        "Drafts",
        _by_drafter_and_depth,
        "Draft tokens verified whose parent was accepted, by drafter, place in the draft, and whether they were "
        "accepted; several at one place count once",
        labels=("drafter", "position", "right"),
    ),
    _gauge(
        "tokens_per_forward",
        "Drafts",
        lambda s: s.generation_tokens / s.forwards if s.forwards else None,
        "Tokens generated per step of a single sequence, since the start",
    ),
    _counter(
        "forwards",
        "Drafts",
        lambda s: s.forwards,
        "Steps of single sequences that generated tokens; one per token without drafts",
    ),
    _counter(
        "forced_tokens",
        "Drafts",
        lambda s: s.forced_tokens,
        "Generated tokens that a grammar forced, several in a step",
    ),
    _gauge(
        "draft_gain",
        "Drafts",
        lambda s: s.draft_gain,
        "Tokens a second with drafts over those without, as last predicted: drafting starts above 1.04",
    ),
    _gauge(
        "draft_saved_seconds",
        "Drafts",
        lambda s: s.draft_saved_seconds,
        "Time saved by drafts since the start, below 0 if lost: the predicted time of plain steps for the same tokens, "
        "less the time of the drafted steps",
        unit="s",
        alert=Alert(
            "KvasirDraftsLose",
            "delta({name}[30m]) < -5",
            "30m",
            "warning",
            "Drafts cost more time than they save on this load: try another --drafter, or none.",
        ),
    ),
    *(
        make(f"learn_{name}", "Drafts", _learned(name), text, labels=("replica",))
        for make, name, text in (
            (_gauge, "version", "Version of the drafter's weights that is served, where it learns"),
            (_gauge, "busy_share", "Share of its time that the drafter's trainer computes"),
            (_counter, "traced", "Tokens recorded for the drafter's trainer"),
            (_counter, "dropped", "Tokens recorded for the drafter's trainer and lost before it read them"),
            (_counter, "swaps", "Times that the served weights of the drafter were replaced"),
            (_counter, "rollbacks", "Versions of the drafter that were refused or taken back"),
        )
    ),
    _gauge(
        "learn_kl",
        "Drafts",
        _kl,
        "Recent mean of KL(model || drafter), by depth of the draft, in nats",
        labels=("replica", "position"),
    ),
    # ---------------------------------------------------------------------------------------------------------- engine
    _counter("steps", "Engine", lambda s: s.step, "Steps", unit="ops"),
    _gauge("step_seconds", "Engine", lambda s: s.step_seconds, "Duration of the last step", unit="s"),
    _gauge("step_rows", "Engine", lambda s: s.step_rows, "Rows of the last step"),
    _gauge(
        "step_time_relative_error",
        "Engine",
        lambda s: _singles(s.step_time_error),
        "Recent mean of |predicted - measured| / measured",
        labels=("kind",),
        unit="percentunit",
    ),
    _counter(
        "requests_failed",
        "Engine",
        lambda s: _singles(s.failed),
        "Requests that the engine failed, by reason",
        labels=("reason",),
    ),
    _counter(
        "engine_restarts",
        "Engine",
        lambda s: s.restarts,
        "Engine processes that died or hung and were replaced",
        alert=Alert(
            "KvasirEngineRestarted",
            "increase({name}[15m]) > 0",
            "0m",
            "critical",
            "The engine process died or hung and was replaced; the log names its crash dump.",
        ),
    ),
    _counter(
        "requests_quarantined",
        "Engine",
        lambda s: s.quarantined,
        "Requests that were failed because the engine process kept dying on them",
        alert=Alert(
            "KvasirRequestQuarantined",
            "increase({name}[1h]) > 0",
            "0m",
            "warning",
            "A request made the engine process die again and again and was refused.",
        ),
    ),
    _gauge(
        "startup_seconds",
        "Engine",
        lambda s: _singles(s.startup),
        "Start-up time by phase",
        labels=("phase",),
        unit="s",
    ),
    _gauge(
        "weight_bytes",
        "Engine",
        lambda s: s.weight_bytes,
        "Bytes of weights that the start read and copied, in startup_seconds of phase fill",
        unit="bytes",
    ),
)
BY_NAME = {definition.name: definition for definition in DEFINITIONS}
