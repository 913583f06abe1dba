"""``kvasir bench rollouts``: the generation phase of reinforcement learning over several rounds, with and without
drafts.

Every round asks the same problems, ``samples`` of each at temperature 1, with new random numbers. Weights may change
between rounds in one of three ways. Successive checkpoints (``--checkpoint``, one a round) are real training. *frozen*
keeps the weights. *perturbed* is a stand-in and labelled so: it adds noise to every matrix, a little more each round,
which moves the policy without teaching it anything.

The output shows forwards, the makespan of each round, percentiles of the lengths, and what was accepted. Random numbers
are the same in every arm. Outputs are the same, too, in exact mode, and up to ties on devices whose bits depend on the
batch.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, percentile, ratios_of, result, save
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.types import SamplingParams
from kvasir_lab.bench.speculation import draft_metrics

# Seed of the problems for warming up.
WARM_SEED = 1
# Tasks with a checker, as reinforcement learning needs.
VERIFIABLE = ("chain", "state", "countdown", "long_add")
ARMS = {
    "plain": SpeculationConfig(),
    "ngram": SpeculationConfig(drafter="ngram"),
    "suffix": SpeculationConfig(drafter="suffix:max_tokens=1000000"),
    "suffix length": SpeculationConfig(drafter="suffix:max_tokens=1000000", draft_control="length"),
    "suffix optimal": SpeculationConfig(drafter="suffix:max_tokens=1000000", draft_control="optimal"),
    "suffix fixed": SpeculationConfig(drafter="suffix:max_tokens=1000000", draft_control="fixed"),
}


class Rollouts:
    """The problems, weights and rounds that every arm shares.

    ``prompts`` holds the token ids of each problem, ``others`` those of problems that are not asked and serve for
    warming up. ``checkpoints`` has a folder a round, or is empty. ``noise`` is the standard deviation of the noise that
    each round adds to every matrix, relative to the matrix's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        prompts: list[list[int]],
        others: list[list[int]],
        stop: int,
        *,
        samples: int,
        rounds: int,
        max_tokens: int,
        checkpoints: Sequence[str],
        noise: float,
    ) -> None:
        self.llm = load_engine(config.replace(drafter="ngram"))
        self.prompts, self.samples, self.rounds, self.noise = prompts, samples, rounds, noise
        self.start = config.model.model or "embedded"
        self.checkpoints = list(checkpoints)
        self.params = dict(temperature=1.0, max_tokens=max_tokens, stop_token_ids=(stop,), n=samples, detokenize=False)
        self._warm(others)

    def _warm(self, prompts: list[list[int]]) -> None:
        """Compile and capture on other prompts: one round without drafts and two with drafts.

        Afterwards drafters forget what they learnt from them.
        """
        draft = dataclasses.replace(ARMS["suffix fixed"], max_draft_tokens=3)
        for speculation in (SpeculationConfig(), draft, draft):
            self.llm.engine.draft_with(speculation)
            self.llm.generate(
                [{"prompt_token_ids": p} for p in prompts], [SamplingParams(**self.params, seed=10**6)] * len(prompts)
            )
            while self.llm.engine.idle():
                pass

    def weights(self, r: int) -> None:
        """Load the weights of round ``r``, the same in every arm."""
        engine = self.llm.engine
        if self.checkpoints:
            engine.update_weights(self.checkpoints[min(r, len(self.checkpoints) - 1)])
        elif r == 0 and self.noise:
            engine.update_weights(self.start)
        elif self.noise:
            generator = torch.Generator().manual_seed(r)
            with torch.inference_mode():
                for slot in engine.runner.model.slots().values():
                    if slot.target.dim() == 2:
                        noise = torch.randn(slot.target.shape, generator=generator)
                        slot.target.add_((noise * self.noise * float(slot.target.float().std())).to(slot.target))
            engine.weights_changed()

    def run(
        self, speculation: SpeculationConfig, expected: list[list[list[int]]] | None
    ) -> tuple[dict[str, Any], list[list[list[int]]]]:
        """Metrics, and the outputs of every round. ``expected`` are the outputs of the plain arm."""
        self.llm.engine.draft_with(speculation)
        rounds: dict[str, list[Any]] = {}
        outputs: list[list[list[int]]] = []
        for r in range(self.rounds):
            self.weights(r)
            before, began = copy.deepcopy(self.llm.engine.stats()), time.perf_counter()
            params = [SamplingParams(**self.params, seed=1000 * r + i) for i in range(len(self.prompts))]
            found = self.llm.generate([{"prompt_token_ids": p} for p in self.prompts], params)
            seconds, stats = time.perf_counter() - began, self.llm.engine.stats()
            outputs.append([list(o.token_ids) for out in found for o in out.outputs])
            lengths = [float(len(o)) for o in outputs[-1]]
            figures = {
                "makespan_s": round(seconds, 3),
                "forwards": stats.step - before.step,
                "tokens": int(sum(lengths)),
                "length_p50": percentile(lengths, 0.5),
                "length_p99": round(percentile(lengths, 0.99), 1),
            }
            if speculation.drafter:
                figures |= draft_metrics(before, stats)
                figures["same_outputs"] = round(sum(a == b for a, b in zip(outputs[-1], expected[r])) / len(lengths), 4)
            for name, value in figures.items():
                rounds.setdefault(name, []).append(value)
        last = {"makespan_s": rounds["makespan_s"][-1], "forwards": rounds["forwards"][-1]}
        return last | {"rounds": rounds}, outputs


def run(
    config: EngineConfig,
    *,
    problems: int,
    samples: int,
    rounds: int,
    tasks: list[str] | None,
    max_tokens: int,
    checkpoints: list[str],
    noise: float,
    only: list[str] | None,
    output: Path | None,
    commit: str | None,
) -> None:
    from kvasir_lab import tokenizer as lab_tokenizer
    from kvasir_lab.lookup import load_task

    if unknown := [name for name in only or () if name not in ARMS]:
        raise ConfigError(f"no arm named '{unknown[0]}'; there are {', '.join(ARMS)}")
    if checkpoints and noise:
        raise ConfigError("weights come from --checkpoint or from --noise, not from both")
    tasks = tasks or list(VERIFIABLE)
    tokenizer = lab_tokenizer.load(resolve(config.model.model))
    counts = {spec: problems // len(tasks) + (i < problems % len(tasks)) for i, spec in enumerate(tasks)}
    prompts, others = (
        [
            tokenizer.encode(p.prompt, add_special_tokens=False).ids
            for spec, count in counts.items()
            for p in load_task(spec).problems("test", seed, count)
        ]
        for seed in (0, WARM_SEED)
    )
    arms_wanted = ["plain", *(name for name in ARMS if name != "plain" and (not only or name in only))]
    bench = Rollouts(
        config,
        prompts,
        others,
        tokenizer.token_to_id("<|im_end|>"),
        samples=samples,
        rounds=rounds,
        max_tokens=max_tokens,
        checkpoints=checkpoints,
        noise=noise,
    )
    weights = (
        f"{len(checkpoints)} checkpoints"
        if checkpoints
        else f"perturbed by {noise:g} a round, a stand-in"
        if noise
        else "frozen"
    )
    setting = described(config, None) | {
        "problems": len(prompts),
        "samples": samples,
        "tasks": tasks,
        "weights": weights,
        "temperature": 1.0,
    }
    arms, plain = [], None

    def outcome() -> dict[str, Any]:
        ratios = {
            k: v
            for k, v in ratios_of(arms, [(a["name"], "plain") for a in arms[1:]]).items()
            if not k.startswith("rounds")
        }
        return result(f"rollouts-{Path(config.model.model).name or 'embedded'}", arms, ratios=ratios)

    try:
        for name in arms_wanted:
            metrics, outputs = bench.run(ARMS[name], plain)
            plain = plain or outputs
            arms.append(
                arm(name, setting | {"drafter": ARMS[name].drafter, "draft_control": ARMS[name].draft_control}, metrics)
            )
            save(outcome(), output, commit)
    finally:
        bench.llm.close()
    finish(outcome(), output, commit)
