"""``kvasir bench offline``: batches of random prompts through the Python API, compared with a peer in the same run.

Each workload runs twice, once for one token (the prompts' cost) and once in full; the difference is decoding. Decoding
is greedy, with ``ignore_eos`` and without prefix reuse. Arms take turns, and the median of the repeats counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import random
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.result import arm, finish, ratios_of, result, spread
from kvasir.bench.workloads import Batch, shape_folder
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.progress import Progress
from kvasir.types import Event, SamplingParams

if TYPE_CHECKING:
    from kvasir.api.offline.llm import LLM

DEFAULT = ("decode1:1:64:128", "decode16:16:64:128")
# Times that a round is measured before it counts as too noisy.
ATTEMPTS = 3
# Completes prompts by exactly so many tokens, and returns what the engine counted meanwhile, by name.
Generate = Callable[..., dict[str, Any] | None]
# Completes prompts by exactly so many tokens, and returns the seconds it took.
Timed = Callable[[list[list[int]], int], float]
# Arm -> metric -> one value for each round.
Samples = dict[str, dict[str, list[float]]]


def run(
    config: EngineConfig,
    *,
    shape: str | None,
    workloads: list[str] | None,
    peer: str | None,
    repeats: int,
    output: Path | None,
    commit: str | None = None,
) -> None:
    """Measure, show the table and write the result.

    Raises ConfigError before anything is loaded where a workload cannot run.
    """
    if peer not in (None, "transformers"):
        raise ConfigError(f"no peer named '{peer}'; there is transformers")
    if peer and importlib.util.find_spec(peer) is None:
        raise ConfigError(f"the peer needs its package: pip install {peer}")
    batches = [Batch.parse(w) for w in workloads or DEFAULT]
    if len({b.name for b in batches}) < len(batches):
        raise ConfigError("two workloads have the same name")
    config = config.replace(enable_prefix_caching=False)
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(shape_folder(shape))
            config = config.replace(
                model=folder, load_format="dummy", skip_tokenizer_init=True, served_model_name=shape
            )
        outcome = _compare(config, shape, batches, peer, repeats, stack)
    finish(outcome, output, commit)


def _compare(
    config: EngineConfig,
    shape: str | None,
    batches: list[Batch],
    peer: str | None,
    repeats: int,
    stack: contextlib.ExitStack,
) -> dict[str, Any]:
    arms: dict[str, Timed] = {}
    starts: dict[str, float] = {}
    started = time.perf_counter()
    generate, llm = own_engine(config, stack)
    info = llm.info
    arms["kvasir"] = timed(generate)
    starts["kvasir"] = time.perf_counter() - started
    for batch in batches:
        if batch.prompt + batch.output > info.max_model_len:
            raise ConfigError(
                f"workload {batch.name}: {batch.prompt} and {batch.output} tokens do not fit the context of "
                f"{info.max_model_len}"
            )
    if peer:
        started = time.perf_counter()
        arms[peer] = timed(transformers_engine(config))
        starts[peer] = time.perf_counter() - started
    measured = measure(arms, batches, info.tokenizer_size, repeats)
    entries = [
        arm(
            name,
            described(config, shape) if name == "kvasir" else {"peer": name},
            {"start_s": round(starts[name], 2), **metrics},
        )
        for name, metrics in measured.items()
    ]
    ratios = ratios_of(entries, [("kvasir", peer)] if peer else [])
    return result(f"offline-{shape or config.model.model or 'embedded'}", entries, ratios=ratios)


class TooNoisy(ConfigError):
    """Other load on the machine left no usable difference for a workload."""


def measure(arms: dict[str, Timed], batches: list[Batch], vocab_size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Spreads of every metric by arm over ``repeats`` rounds. A first round warms caches up and does not count."""
    samples = {name: {} for name in arms}
    with Progress("measuring", every=None, brief=True, still=True) as progress:
        progress.show(0, len(batches) * (1 + repeats))
        for batch in batches:
            rounds(arms, batch, vocab_size, 1, progress=progress)
            for name, metrics in rounds(arms, batch, vocab_size, repeats, progress=progress).items():
                samples[name] |= metrics
    return {name: {key: spread(values) for key, values in metrics.items()} for name, metrics in samples.items()}


def rounds(
    arms: dict[str, Timed],
    batch: Batch,
    vocab_size: int,
    repeats: int,
    first: int = 0,
    kinds: Collection[str] = ("prefill", "decode", "total"),
    progress: Progress | None = None,
) -> Samples:
    """Run ``repeats`` rounds in which the arms take turns with the same prompts.

    The prompts of round ``first + i`` are the same in every call. ``kinds`` are the wanted rates; runs that none of
    them needs are left out.
    """
    samples: Samples = {name: {} for name in arms}
    for repeat in range(first, first + repeats):
        prompts = batch.prompts(vocab_size, random.Random(f"{batch.name} {repeat}"))
        for name, seconds in arms.items():
            if "decode" in kinds:
                start, total = _start_and_total(seconds, prompts, batch)
            else:
                start = seconds(prompts, 1) if "prefill" in kinds else 0.0
                total = seconds(prompts, batch.output) if "total" in kinds else 0.0
            rates = {
                "prefill": (batch.batch * batch.prompt, start),
                "decode": (batch.batch * (batch.output - 1), total - start),
                "total": (batch.batch * batch.output, total),
            }
            for kind, (tokens, spent) in rates.items():
                if kind in kinds:
                    samples[name].setdefault(f"{batch.name}.{kind}_tok_s", []).append(tokens / spent)
        if progress is not None:
            progress.step(batch.name)
        log.info("%s: round %d of %d", batch.name, repeat - first + 1, repeats)
    return samples


def decoding(seconds: Timed, batch: Batch, vocab_size: int, repeats: int, life: int) -> dict[str, list[float]]:
    """Decode rates by metric, for an engine with a prefix cache.

    The prompts of a ``life`` are the same in every round, and a shorter prompt is the beginning of a longer one. Two
    runs do not count. The first computes the prompts, which are cached from then on. The second starts from cached
    prompts and compiles what only such steps need.
    """
    prompts = batch.beginnings(vocab_size, f"life {life}")
    seconds(prompts, batch.output)
    seconds(prompts, 1)
    found = []
    for _ in range(repeats):
        start, total = _start_and_total(seconds, prompts, batch)
        found.append(batch.batch * (batch.output - 1) / (total - start))
    return {f"{batch.name}.decode_tok_s": found}


def _start_and_total(seconds: Timed, prompts: list[list[int]], batch: Batch) -> tuple[float, float]:
    """Seconds to the first tokens, and seconds of the whole run.

    Both are measured again when a delay made the shorter run take as long as the whole. Raises TooNoisy when that
    happens every time.
    """
    for _ in range(ATTEMPTS):
        start, total = seconds(prompts, 1), seconds(prompts, batch.output)
        if total > start:
            return start, total
        log.warning(
            "%s: a run of one token took %.3g s, the whole run %.3g s; both are measured again",
            batch.name,
            start,
            total,
        )
    raise TooNoisy(
        f"workload {batch.name}: {batch.output} tokens took no longer than one token, {ATTEMPTS} times. "
        "Ask for more tokens, or check what else runs on this machine."
    )


def timed(generate: Generate) -> Timed:
    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        started = time.perf_counter()
        generate(prompts, num_tokens)
        return time.perf_counter() - started

    return seconds


def described(config: EngineConfig, shape: str | None) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    default, found = EngineConfig(), {"shape": shape} if shape else {}
    for section in dataclasses.fields(config):
        mine, usual = getattr(config, section.name), getattr(default, section.name)
        found |= {
            f.name: getattr(mine, f.name)
            for f in dataclasses.fields(mine)
            if getattr(mine, f.name) != getattr(usual, f.name)
        }
    if shape:
        found.pop("model")
    return found


def own_engine(config: EngineConfig, stack: contextlib.ExitStack) -> tuple[Generate, LLM]:
    """Our engine and its ``generate``.

    ``generate`` counts ``at_once`` (the most sequences that held memory in a step), ``preemptions`` and ``cached``
    (tokens of prompts that the prefix cache had). Given ids that end an answer, it also counts drafts, and returns the
    answers as ``outputs``. Where adapters are loaded, the prompts take turns with them.
    """
    from kvasir.api.offline.lora import LoRARequest

    llm = stack.enter_context(load_engine(config))
    engine, at_once = llm.engine, 0
    step = engine.step

    def watched() -> list[Event]:
        nonlocal at_once
        events = step()
        at_once = max(at_once, engine.scheduler.num_running)
        return events

    engine.step = watched  # type: ignore[method-assign]

    def drafts() -> dict[str, int]:
        stats = engine.stats()
        return {"drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens, "verified": stats.drafts}

    def generate(prompts: list[list[int]], num_tokens: int, stop: list[int] | None = None) -> dict[str, Any]:
        nonlocal at_once
        at_once, before, drafted = 0, engine.scheduler.preemptions, drafts()
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, stop_token_ids=tuple(stop or ())
        )
        names = list(llm.info.adapters)
        adapters = [LoRARequest(names[i % len(names)]) for i in range(len(prompts))] if names else None
        ended = llm.generate([{"prompt_token_ids": p} for p in prompts], params, lora_request=adapters)
        outputs = [list(o.outputs[0].token_ids) for o in ended]
        assert stop or all(len(ids) == num_tokens for ids in outputs)
        found: dict[str, Any] = {
            "at_once": at_once,
            "preemptions": engine.scheduler.preemptions - before,
            "cached": sum(o.num_cached_tokens for o in ended),
        }
        return (
            found
            if stop is None
            else found | {"outputs": outputs} | {name: count - drafted[name] for name, count in drafts().items()}
        )

    return generate, llm


def transformers_engine(config: EngineConfig) -> Generate:
    """Completion by ``transformers`` with the same checkpoint, device and type: ``generate``, eager, its defaults."""
    import torch
    import transformers

    from kvasir.convert.checkpoint import plain_folder
    from kvasir.engine.start.build import choose_device, choose_dtype
    from kvasir.models import checkpoint

    path = checkpoint.resolve(config.model.model, config.model.revision)
    device = choose_device(config)
    dtype = choose_dtype(config, device, checkpoint.read_config(path))
    if config.model.load_format == "dummy":
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(path), dtype=dtype
        ).to(device)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(plain_folder(path), dtype=dtype).to(device)
    model.eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts, device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + num_tokens
        if device.type == "cuda":
            torch.cuda.synchronize()

    return generate
