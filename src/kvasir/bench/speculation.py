"""``kvasir bench speculation``: forwards and tokens a second with and without drafts, on the same prompts.

On tasks of the lab acceptance is that of the model's own outputs; how much of them repeats itself is printed beside, since
drafters that copy live on that. On random prompts (a shape) outputs mean nothing, so acceptance is *set*: the drafter
``replay`` proposes the plain run's tokens, each spoiled with probability 1 - accept; and the temperature is high, where the
noise of a position, which is the same in every run, outweighs what the batch's size changes in the last bits. Whatever a drafter does, tokens should
be those of the plain run; on devices whose bits depend on the batch a tie may fall the other way, so the share is printed.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, ratios_of, result, spread
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.types import SamplingParams

TASKS = ("chain", "state", "schema", "story")
GRAM = 4
SHAPE_TEMPERATURE = 10.0


@dataclass(frozen=True)
class Load:
    """One round: token ids and parameters."""

    prompts: list[list[int]]
    params: list[SamplingParams]


def task_loads(folder: str, tasks: Sequence[str], count: int, rounds: int, max_tokens: int, temperature: float) -> list[Load]:
    """``count`` unseen problems of each task a round, none twice: a drafter that remembers must not meet what it remembers."""
    from kvasir.lab import tokenizer as lab_tokenizer
    from kvasir.lab.task import load_task

    tokenizer = lab_tokenizer.load(resolve(folder))
    stop = tokenizer.token_to_id("<|im_end|>")
    drawn = [load_task(spec).problems("test", 0, count * rounds) for spec in tasks]
    loads = []
    for r in range(rounds):
        problems = [p for of_task in drawn for p in of_task[r * count:(r + 1) * count]]
        prompts = [tokenizer.encode(p.prompt, add_special_tokens=False).ids for p in problems]
        loads.append(Load(prompts, [SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=(stop,), seed=i, detokenize=False)
                                    for i in range(len(prompts))]))
    return loads


def random_loads(batch: Batch, vocab_size: int, rounds: int, temperature: float) -> list[Load]:
    rng = random.Random(0)
    return [Load(batch.prompts(vocab_size, rng), [SamplingParams(temperature=temperature, max_tokens=batch.output, ignore_eos=True, seed=i,
                                                                 detokenize=False) for i in range(batch.batch)]) for _ in range(rounds)]


def repeated_grams(outputs: Sequence[Sequence[int]]) -> float:
    """The share of the outputs' 4-grams that stood in the same output before."""
    total = fresh = 0
    for output in outputs:
        grams = [tuple(output[i:i + GRAM]) for i in range(len(output) - GRAM + 1)]
        total += len(grams)
        fresh += len(set(grams))
    return 1 - fresh / total if total else 0.0


def measure(config: EngineConfig, loads: list[Load], plain: list[list[int]] | None) -> tuple[dict[str, Any], list[list[int]]]:
    """Metrics of one configuration over all rounds but the first, which warms up (kernels, graphs, the controller), and the
    outputs of all rounds."""
    from kvasir.api.llm import LLM

    rates: list[float] = []
    outputs: list[list[int]] = []
    with LLM(config=config) as llm:
        drafting = llm.engine._drafting
        if drafting is not None and drafting.drafter.name == "replay":
            drafting.drafter.load({tuple(p): o for p, o in zip((p for load in loads for p in load.prompts), plain)}, 1)
        for r, load in enumerate(loads):
            if r == 1:
                before, warmed = copy.deepcopy(llm.engine.stats()), len(outputs)
            began, first = time.perf_counter(), len(outputs)
            outputs += [list(out.outputs[0].token_ids) for out in llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)]
            rates.append(sum(map(len, outputs[first:])) / (time.perf_counter() - began))
        stats = llm.engine.stats()
    tokens, forwards = sum(map(len, outputs[warmed:])), stats.step - before.step
    metrics: dict[str, Any] = {"tokens_per_second": spread(rates[1:]), "forwards": forwards, "tokens": tokens,
                               "tokens_per_forward": round(tokens / forwards, 4)}
    if plain is None:
        metrics["repeated_4grams"] = round(repeated_grams(outputs), 4)
    else:
        metrics["same_outputs"] = round(sum(a == b for a, b in zip(outputs, plain)) / len(plain), 4)
        accepted, drafts = stats.accepted_tokens - before.accepted_tokens, stats.drafts - before.drafts
        metrics["drafted"], metrics["accepted"] = stats.drafted_tokens - before.drafted_tokens, accepted
        metrics["tokens_per_verification"] = round((accepted + drafts) / max(1, drafts), 4)
        metrics["accepted_by_depth"] = {str(depth): round(right / tried, 4) for depth, (tried, right) in enumerate(stats.accepted_by_depth, 1)}
    return metrics, outputs


def run(config: EngineConfig, *, shape: str | None, drafters: list[str] | None, tasks: list[str] | None, accepts: list[float] | None, batch: int,
        count: int, prompt: int, output_tokens: int, temperature: float, repeats: int, output: Path | None, commit: str | None) -> None:
    config = config.replace(max_num_seqs=batch, enable_prefix_caching=False)
    if not drafters and not accepts:
        drafters = ["ngram", "suffix"]
    if shape and drafters and not accepts:
        raise ConfigError("a shape has random weights, whose outputs say nothing of drafters; set what is accepted: --accept 0.7")
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(shape_folder(shape))
            temperature = temperature or SHAPE_TEMPERATURE
            config = config.replace(model=folder, load_format="dummy", skip_tokenizer_init=True, served_model_name=shape)
            loads = random_loads(Batch(shape, batch, prompt, output_tokens), SHAPES[shape]["vocab_size"], 1 + repeats, temperature)
        else:
            loads = task_loads(config.model.model, tasks or TASKS, count, 1 + repeats, output_tokens, temperature)
        metrics, plain = measure(config.replace(drafter=""), loads, None)
        setting = described(config, shape) | {"batch": batch, "temperature": temperature, "tasks": list(tasks or () if shape else tasks or TASKS)}
        arms = [arm("plain", setting, metrics)]
        for drafter in [*(drafters or []), *(f"replay:accept={a:g}" for a in accepts or [])]:
            for control in ("fixed", "goodput"):
                metrics, _ = measure(config.replace(drafter=drafter, draft_control=control), loads, plain)
                arms.append(arm(f"{Path(drafter).name} {control}", setting | {"drafter": drafter, "draft_control": control}, metrics))
    name = f"speculation-{shape or Path(config.model.model).name or 'embedded'}-{batch}"
    ratios = {k: v for k, v in ratios_of(arms, [(a["name"], "plain") for a in arms[1:]]).items()
              if k.startswith(("tokens_per_second", "tokens_per_forward"))}
    finish(result(name, arms, ratios=ratios), output, commit)
