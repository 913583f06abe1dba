"""``kvasir bench run CASE``: our arms, taking turns, between two runs of a peer that needs the machine for itself (A-B-A).

Every engine runs in a process of its own that ends before the next one needs the device. All get the same prompts, in token
ids. A round of the arms is one pass over every workload; when several arms are compared, each lives for one round at a time,
so that drift of the machine meets all of them. The peer's two runs are one arm; the ratio of its medians says how much drifted.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvasir.bench import roofline
from kvasir.bench.case import Case
from kvasir.bench.offline import Samples, rounds
from kvasir.bench.result import arm, finish, judged, ratios_of, result, spread
from kvasir.bench.worker import Worker, check_peer
from kvasir.bench.workloads import shape_folder
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.families import build_spec

Facts = dict[str, dict[str, Any]]


def run_case(case: Case, *, peer: bool, site: str | None, repeats: int | None, only: list[str] | None, output: Path | None,
             commit: str | None) -> None:
    """Measure and show. ``only``: the workloads to run, of those the case has. Raises ConfigError before anything is started."""
    finish(measure(case, peer=peer, site=site, repeats=repeats, only=only), output, commit)


def chosen(names: list[str], only: list[str] | None) -> list[str]:
    if unknown := [n for n in only or () if n not in names]:
        raise ConfigError(f"the case has no workload '{unknown[0]}'; there are {', '.join(names)}")
    return [n for n in names if not only or n in only]


def measure(case: Case, *, peer: bool, site: str | None, repeats: int | None = None, only: list[str] | None = None) -> dict[str, Any]:
    """The case's result. ``peer=False`` leaves the peer out."""
    with_peer = case.peer if peer else None
    if with_peer:
        check_peer(with_peer.name, site)
    keep = chosen([w.batch.name for w in case.workloads], only)
    workloads = [w for w in case.workloads if w.batch.name in keep]
    samples: dict[str, Samples] = {}
    facts: Facts = {}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(shape_folder(case.shape)) if case.shape else case.model
        first = case.arms[case.first]
        rates = roofline.machine_rates(first.get("device", "auto"), first.get("dtype", "auto"))
        spec = build_spec(checkpoint.read_config(checkpoint.resolve(model)))
        limits = roofline.limits(spec, [w.batch for w in workloads], rates) | {k: round(v) for k, v in rates.items()}
        vocab = spec.vocab_size if case.shape else _tokenizer_size(model, spec.vocab_size)

        def visit(name: str, driver: str, options: dict[str, Any], first_round: int, count: int, label: str) -> None:
            """One life of one engine: ``count`` rounds over every workload, after one that does not count."""
            with Worker(driver, str(checkpoint.resolve(model)), options, site if driver != "kvasir" else None) as worker:
                log.info("%s started in %.1f s", name, worker.facts["start_s"])
                starts = facts.get(name, {}).get("starts", [])
                facts[name] = worker.facts | {"starts": [*starts, worker.facts["start_s"]]}
                found = samples.setdefault(label, {}).setdefault(name, {})
                for w in workloads:
                    rounds({name: worker.seconds}, w.warmup, vocab, 1, first=-1)
                    for key, values in rounds({name: worker.seconds}, w.batch, vocab, count, first=first_round)[name].items():
                        found.setdefault(key, []).extend(values)

        count = repeats or case.repeats
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True} if case.shape else {}
        own = {name: {"enable_prefix_caching": False, **dummy, **settings} for name, settings in case.arms.items()}
        peer_options = _peer_options(case) if with_peer else {}
        lives = [(name, settings, turn, 1) for turn in range(count) for name, settings in own.items()]
        if len(own) == 1:
            lives = [(case.first, own[case.first], 0, count)]
        with kept(lambda: samples.get("own", {}).get(case.first)):
            if with_peer:
                visit(with_peer.name, with_peer.name, peer_options, 0, with_peer.repeats[0], "before")
            for name, settings, turn, times in lives:
                visit(name, "kvasir", settings, turn, times, "own")
            if with_peer and with_peer.repeats[1]:
                visit(with_peer.name, with_peer.name, peer_options, with_peer.repeats[0], with_peer.repeats[1], "after")
    return _result(case, samples, facts, limits, peer_options, keep)


@contextlib.contextmanager
def kept(worth: Callable[[], Any]) -> Iterator[None]:
    """An engine that fails, or SIGTERM, does not cost what was measured before it, once ``worth`` is true. What lacks is seen by its n."""
    try:
        yield
    except (ConfigError, SystemExit) as e:
        if not worth():
            raise
        log.error("the run is incomplete: %s", e if isinstance(e, ConfigError) else "it was told to end")


def _peer_options(case: Case) -> dict[str, Any]:
    options = dict(case.peer.options)
    if case.shape:
        options.setdefault("load_format", "dummy")
    if case.peer.name == "vllm":
        options.setdefault("enable_prefix_caching", False)
    return options


def _tokenizer_size(model: str, vocab_size: int) -> int:
    from kvasir.models.tokenizer import Tokenizer

    path = checkpoint.resolve(model)
    return min(vocab_size, Tokenizer.load(path).size) if (path / "tokenizer.json").exists() else vocab_size


def _result(case: Case, samples: dict[str, Samples], facts: Facts, limits: dict[str, float], peer_options: dict[str, Any],
            keep: list[str]) -> dict[str, Any]:
    entries, pairs = [], [(name, case.first) for name in list(case.arms)[1:]]
    for name, settings in case.arms.items():
        if samples["own"].get(name):
            entries.append(_entry(name, {"shape": case.shape, **settings}, facts[name], samples["own"][name]))
    extra, targets = {}, {}
    if peer_options or "before" in samples:
        peer = case.peer.name
        both: dict[str, list[float]] = {}
        for part in ("before", "after"):
            for key, values in samples.get(part, {}).get(peer, {}).items():
                both.setdefault(key, []).extend(values)
        entries.append(_entry(peer, {"peer": peer, **peer_options}, facts[peer], both))
        pairs += [(name, peer) for name in case.arms]
        for key, values in samples.get("after", {}).get(peer, {}).items():
            extra[f"{key} {peer} after/before"] = round(statistics.median(values) / statistics.median(samples["before"][peer][key]), 3)
    ratios = ratios_of(entries, pairs)
    if "before" in samples:
        bounds = {f"{w.batch.name}.{kind}_tok_s": {"at_least": ratio} for w in case.workloads if w.batch.name in keep
                  for kind, ratio in w.targets.items()}
        targets = judged(bounds, ratios, f"{case.first}/{case.peer.name}")
    return result(case.name, entries, ratios=ratios | extra, limits=limits, targets=targets)


def _entry(name: str, config: dict[str, Any], facts: dict[str, Any], samples: dict[str, list[float]]) -> dict[str, Any]:
    config = {k: v for k, v in config.items() if v is not None} | {"version": facts.get("version", "")}
    return arm(name, config, {"start_s": spread(facts["starts"])} | {key: spread(values) for key, values in samples.items()})
