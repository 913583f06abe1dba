"""Count what draft budgets save in rollouts: none, uniform ones, DAS's classes and DAS's optimal budgets.

    python -m kvasir_lab.studies budget_study OUT.json [--model base] [--problems 16] [--samples 16] [--rounds 3]
        [--base 32 128 512]
                                 [--checkpoint FOLDER ...]

Each round asks the same problems at temperature 1, all samples at once, as the formula of DAS supposes (arXiv
2511.13841, section 4). The drafter is ``suffix``. Only the budgets decide what is verified: no measured time does, so
forwards, rows and tokens are exact on any machine; the share of outputs that equal the plain arm's is reported.

The paper's price of a batch is c_base x forwards + c_tok x rows. ``--base`` lists values of c_base / c_tok: how many
rows cost as much as a forward does without any. ``makespan`` is that price, in rows, of the forwards until the last
sample ends, by base. The formula is told the base, so ``optimal`` has an arm for each; all others have one.

Lengths and acceptance are learnt from earlier rounds, so the first says little. ``oracle`` arms know the length of each
sample beforehand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from kvasir.bench.result import arm, percentile, ratios_of
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.models.checkpoint import resolve
from kvasir.speculation.budgets import Optimal
from kvasir.speculation.drafter import StepSeconds
from kvasir.speculation.lengths import Lengths
from kvasir.types import SamplingParams, Sequence
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.bench.rollouts import VERIFIABLE, WARM_SEED, Rollouts
from kvasir_lab.lookup import load_task
from kvasir_lab.study import Report, study

DRAFTER = "suffix:max_tokens=1000000"
MOST = 8  # drafts of a sequence and step


class Priced(Optimal):
    """The formula with a set price: a forward costs ``base`` rows and every row one."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self._base = base

    def plan(self, seqs: Many[Sequence], seconds: StepSeconds) -> None:
        super().plan(seqs, lambda num_seqs, context, drafts, drafted: self._base + num_seqs + drafts)


class Oracle(Priced):
    """Knows the length of each sample of the round. ``lengths``: by the request's seed and the sample's number."""

    def __init__(self, base: float) -> None:
        super().__init__(base)
        self.lengths: dict[tuple[int | None, int], int] = {}

    @property
    def known(self) -> bool:
        return True

    def left(self, seq: Sequence) -> int:
        return max(1, self.lengths[seq.request.params.seed, seq.branch] - seq.num_output)


def arms_of(bases: list[float]) -> dict[str, tuple[int, Callable[[], Lengths] | None]]:
    """Return, by name, the most drafts of a sequence and step, and the rule that budgets them."""
    found: dict[str, tuple[int, Callable[[], Lengths] | None]] = {f"uniform {n}": (n, None) for n in (1, 2, 4, MOST)}
    found["classes"] = (MOST, Lengths)
    for base in bases:
        found[f"optimal, base {base:g}"] = (MOST, partial(Priced, base))
    for base in bases:
        found[f"oracle, base {base:g}"] = (MOST, partial(Oracle, base))
    return found


class Study(Rollouts):
    """Rounds in which budgets alone decide what is verified."""

    def measure(
        self, speculation: SpeculationConfig, budgets: Lengths | None, plain: list[list[list[int]]], bases: list[float]
    ) -> tuple[dict[str, Any], list[list[list[int]]]]:
        """Return the counts of each round, and the outputs. ``plain``: those without drafts, empty in that arm."""
        engine = self.llm.engine
        engine.draft_with(speculation)
        if budgets is not None:
            engine.proposals.drafting._lengths = budgets
        rounds: dict[str, list[Any]] = {}
        outputs: list[list[list[int]]] = []
        for r in range(self.rounds):
            self.weights(r)
            if isinstance(budgets, Oracle):
                budgets.lengths = {
                    (1000 * r + i // self.samples, i % self.samples): len(out) for i, out in enumerate(plain[r])
                }
            before = copy.deepcopy(engine.stats())
            params = [SamplingParams(**self.params, seed=1000 * r + i) for i in range(len(self.prompts))]
            found = self.llm.generate([{"prompt_token_ids": p} for p in self.prompts], params)
            stats = engine.stats()
            outputs.append([list(o.token_ids) for out in found for o in out.outputs])
            lengths = [float(len(out)) for out in outputs[-1]]
            steps, forwards = stats.step - before.step, stats.forwards - before.forwards
            drafted = stats.drafted_tokens - before.drafted_tokens
            counted = {
                "forwards": steps,
                "rows": forwards + drafted,
                "drafted": drafted,
                "accepted": stats.accepted_tokens - before.accepted_tokens,
                "tokens_per_forward": round(sum(lengths) / forwards, 4),
                "tokens": int(sum(lengths)),
                "length_p50": percentile(lengths, 0.5),
                "length_max": max(lengths),
            }
            counted |= {f"makespan, base {base:g}": round(base * steps + forwards + drafted) for base in bases}
            if plain:
                counted["same_outputs"] = round(sum(a == b for a, b in zip(outputs[-1], plain[r])) / len(lengths), 4)
            for name, value in counted.items():
                rounds.setdefault(name, []).append(value)
        later = {
            f"makespan, base {base:g}, after round 1": sum(rounds[f"makespan, base {base:g}"][1:]) for base in bases
        }
        return later | {"forwards after round 1": sum(rounds["forwards"][1:]), "rounds": rounds}, outputs


@study("budgets-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    problems: int = 16,
    samples: int = 16,
    rounds: int = 3,
    output_tokens: int = 384,
    base: tuple[float, ...] = (32.0, 128.0, 512.0),
    checkpoint: tuple[str, ...] = (),
) -> None:
    tokenizer = lab_tokenizer.load(resolve(model))
    each = problems // len(VERIFIABLE)
    prompts, others = (
        [
            tokenizer.encode(p.prompt, add_special_tokens=False).ids
            for spec in VERIFIABLE
            for p in load_task(spec).problems("test", seed, count)
        ]
        for seed, count in ((0, each), (WARM_SEED, 1))
    )
    config = EngineConfig.of(
        model=model, device="cpu", max_num_seqs=problems * samples, max_num_batched_tokens=4096, num_threads=1
    )
    measured = Study(
        config,
        prompts,
        others,
        tokenizer.token_to_id("<|im_end|>"),
        samples=samples,
        rounds=rounds,
        max_tokens=output_tokens,
        checkpoints=list(checkpoint),
        noise=0.0,
    )
    setting = {
        "drafter": DRAFTER,
        "tasks": list(VERIFIABLE),
        "problems": len(prompts),
        "samples": samples,
        "temperature": 1.0,
        "weights": f"{len(checkpoint)} checkpoints" if checkpoint else "frozen",
        "bases": list(base),
    }

    def store(name: str, config: dict[str, Any], metrics: dict[str, Any]) -> None:
        arms = [*report.arms, arm(name, config, metrics)]
        pairs = [(a["name"], "plain") for a in arms[1:]]
        report.more["ratios"] = {k: v for k, v in ratios_of(arms, pairs).items() if "after round 1" in k}
        report.add(name, config, metrics)

    try:
        metrics, plain = measured.measure(SpeculationConfig(), None, [], base)
        store("plain", setting, metrics)
        for name, (most, budgets) in arms_of(base).items():
            speculation = SpeculationConfig(drafter=DRAFTER, draft_control="fixed", max_draft_tokens=most)
            store(name, {}, measured.measure(speculation, budgets() if budgets else None, plain, base)[0])
    finally:
        measured.llm.close()
