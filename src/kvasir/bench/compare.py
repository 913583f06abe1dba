"""``kvasir bench run CASE``: run our arms in turns between two runs of a peer (A-B-A).

Every engine runs in a process of its own, which ends before the next one needs the device. All get the same prompts as
token ids. A round is one pass over every workload. Several arms live for one round at a time, so that drift of the
machine affects all of them alike. The peer's two runs form one arm, and the ratio of their medians shows how much the
machine drifted. A peer may have variants (another cache type, for instance), which run whenever it does. The result is
written after every life.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.bench import roofline, texts
from kvasir.bench.case import Case, Workload
from kvasir.bench.offline import Samples, decoding, rounds
from kvasir.bench.result import arm, finish, judged, ratios_of, result, save, spread
from kvasir.bench.startup import random_checkpoint
from kvasir.bench.worker import Worker, check_peer
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.families import build_spec

Facts = dict[str, dict[str, Any]]
# Name of the fact that says how many tokens an engine's cache holds; peers do not tell it.
CAPACITY = "kv_capacity_tokens"


def run_case(
    case: Case,
    *,
    peer: bool,
    site: str | None,
    repeats: int | None,
    only: list[str] | None,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure a case and show the result. ``only`` names the workloads to run.

    Raises ConfigError before anything is started.
    """
    finish(measure(case, peer=peer, site=site, repeats=repeats, only=only, keep=keeper(output, commit)), output, commit)


def keeper(output: Path | None, commit: str | None) -> Callable[[dict[str, Any]], None]:
    """A function that writes the result so far to ``output``, if given."""
    return partial(save, output=output, commit=commit)


def chosen(names: list[str], only: list[str] | None) -> list[str]:
    if unknown := [n for n in only or () if n not in names]:
        raise ConfigError(f"the case has no workload '{unknown[0]}'; there are {', '.join(names)}")
    return [n for n in names if not only or n in only]


def measure(
    case: Case,
    *,
    peer: bool,
    site: str | None,
    repeats: int | None = None,
    only: list[str] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda so_far: None,
) -> dict[str, Any]:
    """The result of a case.

    ``peer=False`` leaves the peer out. ``keep`` gets the result so far after every life, from our first one on.
    """
    with_peer = case.peer if peer else None
    if with_peer:
        check_peer(with_peer.name, site)
    names = chosen([w.batch.name for w in case.workloads], only)
    workloads = [w for w in case.workloads if w.batch.name in names]
    samples: dict[str, Samples] = {}
    facts: Facts = {}
    with contextlib.ExitStack() as stack:
        model = case.model
        if case.shape:
            model = stack.enter_context(random_checkpoint(case.shape) if case.on_disk else shape_folder(case.shape))
        first = case.arms[case.first]
        rates = roofline.machine_rates(first.get("device", "auto"), first.get("dtype", "auto"))
        config = checkpoint.read_config(checkpoint.resolve(model))
        spec = build_spec(config)
        models = {arm: stack.enter_context(shape_folder(shape)) for arm, shape in case.shapes.items()}
        others = {arm: SHAPES[shape] for arm, shape in case.shapes.items()}
        for arm, other in others.items():
            if build_spec(other).vocab_size != spec.vocab_size:
                raise ConfigError(f"arm {arm}: its shape has another vocabulary than {case.shape}")
        limits = _limits(case, config, others, workloads, rates)
        vocab = spec.vocab_size if case.shape else _tokenizer_size(model, spec.vocab_size)
        made, known = texts.Texts(model, vocab), {}

        def visit(name: str, driver: str, options: dict[str, Any], first_round: int, count: int, label: str) -> None:
            """Run one life of one engine: ``count`` rounds over every workload, after one that does not count."""
            from kvasir.convert.checkpoint import plain_folder  # imports torch, which only a peer needs

            own, folder = driver == "kvasir", checkpoint.resolve(models.get(name, model))
            with Worker(driver, str(folder if own else plain_folder(folder)), options, None if own else site) as worker:
                log.info("%s started in %.1f s", name, worker.facts["start_s"])
                starts = facts.get(name, {}).get("starts", [])
                facts[name] = worker.facts | {"starts": [*starts, worker.facts["start_s"]]}
                found = samples.setdefault(label, {}).setdefault(name, {})
                for w in workloads:
                    tokens, room = w.batch.batch * (w.batch.prompt + w.batch.output), worker.facts.get(CAPACITY)
                    if case.cached and room is not None and tokens > room:
                        log.warning(
                            "%s: %s is left out: its prompts would not stay cached, since its %d tokens are more than "
                            "the %d that the cache holds here",
                            name,
                            w.batch.name,
                            tokens,
                            room,
                        )
                        continue
                    values_of = (
                        texts.life(worker, w.text, w.batch, made, count, first_round, known)
                        if w.text != "random"
                        else _life(worker, w, vocab, count, first_round, case.cached)
                    )
                    for key, values in values_of.items():
                        found.setdefault(key, []).extend(values)
            if samples.get("own", {}).get(case.first):
                keep(_result(case, samples, facts, limits, peer_options, names))

        count = repeats or case.repeats
        dummy = {"skip_tokenizer_init": True} | ({} if case.on_disk else {"load_format": "dummy"}) if case.shape else {}
        own = {
            name: {"enable_prefix_caching": case.cached, **dummy, **settings} for name, settings in case.arms.items()
        }
        peer_options = _peer_options(case) if with_peer else {}
        lives = [
            (name, settings, turn * case.rounds, case.rounds) for turn in range(count) for name, settings in own.items()
        ]
        if len(own) == 1:
            lives = [(case.first, own[case.first], 0, count)]
        plans = [(name, "kvasir", settings, number, times, "own") for name, settings, number, times in lives]
        if with_peer:
            before, after = with_peer.repeats
            around = [(name, with_peer.name, options) for name, options in peer_options.items()]
            plans = (
                [(*p, 0, before, "before") for p in around]
                + plans
                + [(*p, before, after, "after") for p in around if after]
            )
        for plan in plans:
            variant = with_peer is not None and plan[0] in with_peer.variants
            with kept(lambda spare=variant: spare or samples.get("own", {}).get(case.first)) as state:
                visit(*plan)
            if state.told_to_end:
                break
    return _result(case, samples, facts, limits, peer_options, names)


def _life(
    worker: Worker, workload: Workload, vocab: int, count: int, first_round: int, cached: bool
) -> dict[str, list[float]]:
    """Metrics of one workload from one life of an engine, with a value for each round."""
    if cached:
        return decoding(worker.seconds, workload.batch, vocab, count, first_round)
    rounds({"": worker.seconds}, workload.warmup, vocab, 1, first=-1, kinds=workload.kinds)
    found: dict[str, list[float]] = {}
    for number in range(first_round, first_round + count):
        for key, values in rounds({"": worker.seconds}, workload.batch, vocab, 1, first=number, kinds=workload.kinds)[
            ""
        ].items():
            found.setdefault(key, []).extend(values)
        for key, value in worker.counts.items() if workload.kinds == ("total",) else ():
            found.setdefault(f"{workload.batch.name}.{key}", []).append(value)
    return found


def _limits(
    case: Case, config: dict[str, Any], others: dict[str, Any], workloads: list[Workload], rates: dict[str, float]
) -> dict[str, Any]:
    """Limits of the machine by metric, and by "METRIC ARM" for arms that store weights, or keys and values, in other
    numbers of bytes, or have another shape (``others``: its config).

    Variants of a peer have no limits, since only the peer knows what their options change.
    """
    spec, batches, width = build_spec(config), [w.batch for w in workloads], int(rates["dtype_bytes"])
    share = roofline.weight_share(config, width)
    plain = roofline.limits(spec, batches, rates, weight_share=share)
    limits: dict[str, Any] = plain | {k: round(v) for k, v in rates.items()}
    for name, settings in case.arms.items():
        codec, weights = settings.get("kv_codec", "plain"), settings.get("weights", "auto")
        if codec != "plain" or weights != "auto" or name in others:
            mine = others.get(name, config)
            own = build_spec(mine)
            found = roofline.limits(
                own,
                batches,
                rates,
                kv_share=1.0 if codec == "plain" else roofline.kv_share(own, codec, width),
                weight_share=roofline.weight_share(mine, width, weights),
            )
            # A limit is None where a CPU's caches hold everything that the arm's step reads.
            limits |= {f"{metric} {name}": found.get(metric) for metric in plain}
    return limits | {f"{metric} {name}": None for name in (case.peer.variants if case.peer else ()) for metric in plain}


@dataclass(slots=True)
class State:
    told_to_end: bool = False


@contextlib.contextmanager
def kept(worth: Callable[[], Any]) -> Iterator[State]:
    """Keep what was measured when an engine fails or SIGTERM arrives, once ``worth`` returns true.

    The ``n`` of a spread shows what is missing.
    """
    state = State()
    try:
        yield state
    except (ConfigError, SystemExit) as e:
        if not worth():
            raise
        state.told_to_end = isinstance(e, SystemExit)
        log.error("the run is incomplete: %s", "it was told to end" if state.told_to_end else e)


def _peer_options(case: Case) -> dict[str, dict[str, Any]]:
    """Options of the peer and its variants, by arm."""
    dummy = {"load_format": "dummy"} if case.shape and not case.on_disk else {}
    caching = {"enable_prefix_caching": case.cached} if case.peer.name == "vllm" else {}
    return {name: {**dummy, **caching, **options} for name, options in case.peer.arms.items()}


def _tokenizer_size(model: str, vocab_size: int) -> int:
    from kvasir.models.tokenizer import Tokenizer

    path = checkpoint.resolve(model)
    return min(vocab_size, Tokenizer.load(path).size) if (path / "tokenizer.json").exists() else vocab_size


def _result(
    case: Case,
    samples: dict[str, Samples],
    facts: Facts,
    limits: dict[str, Any],
    peer_options: dict[str, dict[str, Any]],
    names: list[str],
) -> dict[str, Any]:
    entries, pairs = [], [(name, case.first) for name in list(case.arms)[1:]]
    for name, settings in case.arms.items():
        if samples.get("own", {}).get(name):
            config = {"shape": case.shapes.get(name, case.shape), **settings}
            entries.append(_entry(name, config, facts[name], samples["own"][name]))
    extra, targets = {}, {}
    for peer in [name for name in peer_options if name in samples.get("before", {})]:
        both: dict[str, list[float]] = {}
        for part in ("before", "after"):
            for key, values in samples.get(part, {}).get(peer, {}).items():
                both.setdefault(key, []).extend(values)
        entries.append(_entry(peer, {"peer": case.peer.name, **peer_options[peer]}, facts[peer], both))
        pairs += [(name, peer) for name in case.arms]
        for key, values in samples.get("after", {}).get(peer, {}).items():
            if isinstance(values[0], dict):
                continue
            # The median is zero where none of a load's drafts was accepted.
            if before := statistics.median(samples["before"][peer].get(key, [0])):
                extra[f"{key} {peer} after/before"] = round(statistics.median(values) / before, 3)
    ratios = ratios_of(entries, pairs)
    if "before" in samples:
        bounds = {
            f"{w.batch.name}.{kind}_tok_s": {"at_least": ratio}
            for w in case.workloads
            if w.batch.name in names
            for kind, ratio in w.targets.items()
        }
        targets = judged(bounds, ratios, f"{case.first}/{case.peer.name}")
    for name, least in case.targets.items():
        metric, _, pair = name.rpartition(" ")
        found = {key: value for key, value in ratios_of(entries, [tuple(pair.split("/"))]).items() if key == name}
        ratios |= found
        targets |= judged({metric: {"at_least": least}}, found, pair)
    return result(case.name, entries, ratios=ratios | extra, limits=limits, targets=targets)


def _entry(name: str, config: dict[str, Any], facts: dict[str, Any], samples: dict[str, list[float]]) -> dict[str, Any]:
    config = {k: v for k, v in config.items() if v is not None} | {"version": facts.get("version", "")}
    read_off = {key: facts[key] for key in ("kv_bytes_per_token", CAPACITY) if key in facts}
    return arm(
        name,
        config,
        {"start_s": spread(facts["starts"])}
        | read_off
        | {
            key: texts.mean(values) if isinstance(values[0], dict) else spread(values)
            for key, values in samples.items()
        },
    )
