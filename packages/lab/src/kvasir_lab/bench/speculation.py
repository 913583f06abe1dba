"""``kvasir bench speculation``: forwards and tokens a second with and without drafts, on the same prompts.

On tasks of the lab, acceptance is that of the model's own outputs. The share of repeated text in them is printed, too,
since drafters that copy depend on it.

On random prompts (a shape) outputs mean nothing, so acceptance is *set*. The drafter ``replay`` proposes the plain
run's tokens, each spoiled with probability 1 - accept. The temperature is high: the noise of a position is the same in
every run, and it outweighs the change that the batch's size makes in the last bits.

In exact mode drafts change no token; on devices whose bits depend on the batch a tie may fall the other way, so the
share of equal outputs is printed.

A shape is measured in one process, with weights loaded once, one batch after another: plain rounds, the controller at
every acceptance and fixed depths for comparison, and the plain rounds again. The prompts' cost is measured alone and
taken off both. A call continues the JSON that an earlier call of the same commit and settings wrote: complete batches
are not measured again, an incomplete one is.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.provenance import commit as commit_here
from kvasir.bench.result import arm, finish, ratios_of, result, save, spread, without_paths
from kvasir.bench.texts import repeated_grams
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models.checkpoint import resolve
from kvasir.progress import Progress
from kvasir.types import EngineStats, SamplingParams

TASKS = ("chain", "state", "schema", "story")
SHAPE_TEMPERATURE = 10.0
WARM_TOKENS = 24
# Depths that the controller is compared with, and the largest batch at which the last of them is measured.
FIXED, LARGE = (1, 2, 4, 8), 64


@dataclass(frozen=True)
class Load:
    """One round: token ids and parameters."""

    prompts: list[list[int]]
    params: list[SamplingParams]


def task_loads(
    folder: str, tasks: Sequence[str], count: int, rounds: int, max_tokens: int, temperature: float
) -> list[Load]:
    """Problems for each round: ``count`` unseen ones of each task, none twice.

    A drafter that remembers must not meet a problem again.
    """
    from kvasir_lab import tokenizer as lab_tokenizer
    from kvasir_lab.lookup import load_task

    tokenizer = lab_tokenizer.load(resolve(folder))
    stop = tokenizer.token_to_id("<|im_end|>")
    drawn = [load_task(spec).problems("test", 0, count * rounds) for spec in tasks]
    loads = []
    for r in range(rounds):
        problems = [p for of_task in drawn for p in of_task[r * count : (r + 1) * count]]
        prompts = [tokenizer.encode(p.prompt, add_special_tokens=False).ids for p in problems]
        loads.append(
            Load(
                prompts,
                [
                    SamplingParams(
                        temperature=temperature, max_tokens=max_tokens, stop_token_ids=(stop,), seed=i, detokenize=False
                    )
                    for i in range(len(prompts))
                ],
            )
        )
    return loads


def random_loads(batch: Batch, vocab_size: int, rounds: int, temperature: float) -> list[Load]:
    rng = random.Random(0)
    return [
        Load(
            batch.prompts(vocab_size, rng),
            [
                SamplingParams(
                    temperature=temperature, max_tokens=batch.output, ignore_eos=True, seed=i, detokenize=False
                )
                for i in range(batch.batch)
            ],
        )
        for _ in range(rounds)
    ]


def counted(loads: Sequence[Load], title: str) -> Iterator[Load]:
    """Yield the rounds, with a bar on a terminal and a line now and then elsewhere."""
    with Progress(f"{title}, round", brief=True, still=True) as progress:
        for done, load in enumerate(loads):
            progress.show(done, len(loads))
            yield load


def measure(
    config: EngineConfig, loads: list[Load], plain: list[list[int]] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Metrics of one configuration, and the outputs of all rounds.

    The first round warms up kernels, graphs and the controller, and does not count.
    """
    rates: list[float] = []
    outputs: list[list[int]] = []
    with load_engine(config) as llm:
        drafting = llm.engine.proposals.drafting
        if drafting is not None and drafting.drafter.name == "replay":
            drafting.drafter.load({tuple(p): o for p, o in zip((p for load in loads for p in load.prompts), plain)}, 1)
        for r, load in enumerate(counted(loads, config.speculation.drafter or "without drafts")):
            if r == 1:
                before, warmed = copy.deepcopy(llm.engine.stats()), len(outputs)
            began, first = time.perf_counter(), len(outputs)
            outputs += [
                list(out.outputs[0].token_ids)
                for out in llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)
            ]
            rates.append(sum(map(len, outputs[first:])) / (time.perf_counter() - began))
        stats = llm.engine.stats()
    tokens, forwards = sum(map(len, outputs[warmed:])), stats.step - before.step
    metrics: dict[str, Any] = {
        "tokens_per_second": spread(rates[1:]),
        "forwards": forwards,
        "tokens": tokens,
        "tokens_per_forward": round(tokens / forwards, 4),
    }
    if plain is None:
        metrics["repeated_4grams"] = round(repeated_grams(outputs), 4)
    else:
        metrics["same_outputs"] = round(sum(a == b for a, b in zip(outputs, plain)) / len(plain), 4)
        metrics |= draft_metrics(before, stats)
        metrics["accepted_by_depth"] = {
            str(depth): round(right / tried, 4) for depth, (tried, right) in enumerate(stats.accepted_by_depth, 1)
        }
    return metrics, outputs


class Sweep:
    """One engine for all arms of a shape. Arms that have not started after ``seconds`` are left out."""

    def __init__(
        self,
        config: EngineConfig,
        shape: str,
        seconds: float,
        save: Callable[[list[dict[str, Any]]], None],
        arms: list[dict[str, Any]],
    ) -> None:
        self._started, self._limit, self._save = time.perf_counter(), seconds, save
        self.llm = load_engine(config.replace(drafter="replay"))
        self.setting = described(config, shape)
        self.arms = arms  # those of an earlier call, which this one continues

    def left(self) -> float:
        return self._limit - (time.perf_counter() - self._started)

    def batch(
        self,
        batch: Batch,
        vocab_size: int,
        accepts: Sequence[float],
        temperature: float,
        repeats: int,
        depths: Sequence[int],
    ) -> None:
        loads = random_loads(batch, vocab_size, 1 + repeats, temperature)
        outputs: list[list[list[int]]] = []
        self._rounds(loads[:1], SpeculationConfig(), None, [], warm=0)
        while self.llm.engine.idle():  # capture graphs, as a server does when it is idle
            pass
        before, plain = self._rounds(loads, SpeculationConfig(), None, outputs := [])
        prompts = self._prompts(loads[-1])
        known = {tuple(p): o for load, found in zip(loads, outputs) for p, o in zip(load.prompts, found)}
        for depth in depths:  # compile the kernels of these steps before anything counts
            self._rounds(
                [Load(loads[0].prompts, [dataclasses.replace(q, max_tokens=WARM_TOKENS) for q in loads[0].params])],
                SpeculationConfig(drafter="replay:accept=0.5", draft_control="fixed", max_draft_tokens=depth),
                known,
                [],
                warm=0,
            )
        runs: dict[str, tuple[list[float], dict[str, Any]]] = {}
        for accept in accepts:
            spec = SpeculationConfig(drafter=f"replay:accept={accept:g}")
            runs[f"goodput accept={accept:g}"] = self._rounds(loads, spec, known, outputs)
        for depth in depths:
            for accept in accepts:
                if accept and self.left() > 0:
                    spec = SpeculationConfig(
                        drafter=f"replay:accept={accept:g}", draft_control="fixed", max_draft_tokens=depth
                    )
                    runs[f"fixed{depth} accept={accept:g}"] = self._rounds(loads[1:2], spec, known, outputs, warm=0)
        after, _ = self._rounds(loads, SpeculationConfig(), None, [])
        off = before + after
        setting = self.setting | of_batch(batch, temperature, repeats)
        count = batch.batch * (batch.output - 1)
        usual = count / (statistics.median(off) - prompts)
        self.arms.append(
            arm(
                f"plain {batch.batch}",
                setting,
                plain | {"decode_tok_s": spread([count / (s - prompts) for s in off]), "prompts_s": round(prompts, 4)},
            )
        )
        for name, (seconds, metrics) in runs.items():
            rates = [count / (s - prompts) for s in seconds]
            metrics = metrics | {"decode_tok_s": spread(rates), "of_plain": round(statistics.median(rates) / usual, 4)}
            self.arms.append(arm(f"{name} {batch.batch}", setting, metrics))
        self._compare(batch.batch, accepts)
        self._save(self.arms)

    def _compare(self, batch: int, accepts: Sequence[float]) -> None:
        """Compare the controller with the best fixed depth, or no drafts where those are faster.

        Only the first round counts. Fixed depths run only that one, and other rounds spoil other tokens.
        """
        found = {a["name"]: a["metrics"] for a in self.arms}
        for accept in accepts:
            beside = [
                name for name in found if name.startswith("fixed") and name.endswith(f" accept={accept:g} {batch}")
            ]
            rates = [found[name]["decode_tok_s"]["median"] for name in [f"plain {batch}", *beside]]
            entry = found[f"goodput accept={accept:g} {batch}"]
            entry["of_best_fixed"] = round(entry["decode_tok_s"]["values"][0] / max(rates), 4)

    def _prompts(self, load: Load) -> float:
        """Seconds that the prompts alone take."""
        began = time.perf_counter()
        self.llm.generate(
            [{"prompt_token_ids": p} for p in load.prompts], [dataclasses.replace(q, max_tokens=1) for q in load.params]
        )
        return time.perf_counter() - began

    def _rounds(
        self,
        loads: list[Load],
        spec: SpeculationConfig,
        known: dict[tuple[int, ...], list[int]] | None,
        outputs: list[list[list[int]]],
        warm: int = 1,
    ) -> tuple[list[float], dict[str, Any]]:
        """Seconds of every round after the first ``warm``, and the drafts' figures.

        ``outputs`` takes the outputs of plain rounds.
        """
        drafter = self.llm.engine.draft_with(spec)
        if drafter is not None:
            drafter.load(known, 1)
        seconds, same, tokens = [], 0, 0
        for r, load in enumerate(counted(loads, spec.drafter or "without drafts")):
            if r == warm:
                before = copy.deepcopy(self.llm.engine.stats())
            began = time.perf_counter()
            found = [
                list(out.outputs[0].token_ids)
                for out in self.llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)
            ]
            seconds.append(time.perf_counter() - began)
            if known is None:
                outputs.append(found)
            if r >= warm:
                tokens += sum(map(len, found))
                same += sum(known is None or known[tuple(p)] == o for p, o in zip(load.prompts, found))
        stats = self.llm.engine.stats()
        forwards = stats.step - before.step
        metrics: dict[str, Any] = {"forwards": forwards, "tokens_per_forward": round(tokens / forwards, 4)}
        if known is not None:
            metrics |= draft_metrics(before, stats) | {
                "same_outputs": round(same / sum(len(load.prompts) for load in loads[warm:]), 4)
            }
        return seconds[warm:], metrics


def of_batch(batch: Batch, temperature: float, repeats: int) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "prompt": batch.prompt,
        "output": batch.output,
        "temperature": temperature,
        "repeats": repeats,
    }


def depths_of(batch: int) -> tuple[int, ...]:
    return FIXED if batch <= LARGE else FIXED[:-1]


def names_of(batch: int, accepts: Sequence[float]) -> list[str]:
    """Names of the arms of a batch that was measured completely."""
    controlled = [f"goodput accept={accept:g} {batch}" for accept in accepts]
    return [
        f"plain {batch}",
        *controlled,
        *(f"fixed{depth} accept={accept:g} {batch}" for depth in depths_of(batch) for accept in accepts if accept),
    ]


def earlier(
    output: Path | None, case: str, commit: str, settings: list[dict[str, Any]], accepts: Sequence[float]
) -> list[dict[str, Any]]:
    """Arms of the batches that an earlier call measured completely with this commit, case and ``settings``."""
    try:
        found = json.loads(output.read_text()) if output is not None else {}
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or (found.get("case"), found.get("commit")) != (case, commit):
        return []
    arms = {a["name"]: a for a in found.get("arms", [])}
    whole = []
    for setting in settings:
        names = names_of(setting["batch"], accepts)
        if all(name in arms and arms[name]["config"] == without_paths(setting) for name in names):
            log.info("batch %d: measured by an earlier call", setting["batch"])
            whole += [arms[name] for name in names]
    return whole


def draft_metrics(before: EngineStats, stats: EngineStats) -> dict[str, Any]:
    accepted, drafts = stats.accepted_tokens - before.accepted_tokens, stats.drafts - before.drafts
    saved = (
        {}
        if stats.draft_saved_seconds is None
        else {"saved_s": round(stats.draft_saved_seconds - (before.draft_saved_seconds or 0.0), 4)}
    )
    generated, forwards = stats.generation_tokens - before.generation_tokens, stats.forwards - before.forwards
    return saved | {
        "draft_steps": stats.draft_steps - before.draft_steps,
        "drafted": stats.drafted_tokens - before.drafted_tokens,
        "accepted": accepted,
        "tokens_per_verification": round((accepted + drafts) / max(1, drafts), 4),
        "tokens_per_sequence_forward": round(generated / max(1, forwards), 4),
    }


def run_shape(
    config: EngineConfig,
    shape: str,
    *,
    accepts: list[float],
    batches: list[int],
    prompt: int,
    output_tokens: int,
    temperature: float,
    repeats: int,
    seconds: float,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure all batches of a shape in one process, except those in ``output``.

    The result so far is written after each batch.
    """
    case, temperature = f"speculation-{shape}", temperature or SHAPE_TEMPERATURE

    def outcome(arms: list[dict[str, Any]]) -> dict[str, Any]:
        found = {
            f"decode_tok_s {a['name']}/plain": a["metrics"]["of_plain"] for a in arms if "of_plain" in a["metrics"]
        }
        return result(case, arms, ratios=found)

    with shape_folder(shape) as folder:
        config = config.replace(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            served_model_name=shape,
            max_num_seqs=max(batches),
            max_model_len=config.model.max_model_len or prompt + output_tokens,
            enable_prefix_caching=False,
        )
        loads = [Batch(shape, size, prompt, output_tokens) for size in batches]
        settings = [described(config, shape) | of_batch(load, temperature, repeats) for load in loads]
        arms = earlier(output, case, commit or commit_here(), settings, accepts)
        done = {a["config"]["batch"] for a in arms}
        if done.issuperset(batches):
            return finish(outcome(arms), output, commit)
        sweep = Sweep(config, shape, seconds, lambda arms: save(outcome(arms), output, commit), arms)
        try:
            for load in loads:
                if sweep.left() > 0 and load.batch not in done:
                    sweep.batch(load, SHAPES[shape]["vocab_size"], accepts, temperature, repeats, depths_of(load.batch))
        finally:
            sweep.llm.close()
        finish(outcome(sweep.arms), output, commit)


def run(
    config: EngineConfig,
    *,
    shape: str | None,
    drafters: list[str] | None,
    tasks: list[str] | None,
    accepts: list[float] | None,
    batch: list[int],
    count: int,
    prompt: int,
    output_tokens: int,
    temperature: float,
    repeats: int,
    seconds: float,
    output: Path | None,
    commit: str | None,
) -> None:
    config = config.replace(max_num_seqs=batch[0], enable_prefix_caching=False)
    if shape:
        if drafters:
            raise ConfigError(
                "a shape has random weights, whose outputs say nothing about drafters; set the acceptance: --accept 0.7"
            )
        return run_shape(
            config,
            shape,
            accepts=accepts or [0.0, 0.7],
            batches=batch,
            prompt=prompt,
            output_tokens=output_tokens,
            temperature=temperature,
            repeats=repeats,
            seconds=seconds,
            output=output,
            commit=commit,
        )
    if len(batch) > 1:
        raise ConfigError("several batches can be measured only for a shape; for a model name one: --batch 4")
    if not drafters and not accepts:
        drafters = ["ngram", "suffix"]
    loads = task_loads(config.model.model, tasks or TASKS, count, 1 + repeats, output_tokens, temperature)
    metrics, plain = measure(config.replace(drafter=""), loads, None)
    setting = described(config, None) | {"batch": batch[0], "temperature": temperature, "tasks": list(tasks or TASKS)}
    arms = [arm("plain", setting, metrics)]

    def outcome() -> dict[str, Any]:
        ratios = {
            k: v
            for k, v in ratios_of(arms, [(a["name"], "plain") for a in arms[1:]]).items()
            if k.startswith(("tokens_per_second", "tokens_per_forward"))
        }
        return result(f"speculation-{Path(config.model.model).name or 'embedded'}-{batch[0]}", arms, ratios=ratios)

    for drafter in [*(drafters or []), *(f"replay:accept={a:g}" for a in accepts or [])]:
        for control in ("fixed", "goodput"):
            metrics, _ = measure(config.replace(drafter=drafter, draft_control=control), loads, plain)
            arms.append(
                arm(
                    f"{Path(drafter).name} {control}", setting | {"drafter": drafter, "draft_control": control}, metrics
                )
            )
            save(outcome(), output, commit)
    finish(outcome(), output, commit)
