"""Prompts of measurements that are problems of the lab: ``tasks`` to solve, and ``edits`` of given solutions."""

from __future__ import annotations

from kvasir.bench.workloads import Batch
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.lookup import load_task

# Tasks by the kind of text.
TASKS = {"tasks": ("chain", "state", "schema", "template"), "edits": ("refine/chain", "aggregate/chain")}


def prompts(model: str, kind: str, batch: Batch, number: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of round ``number``, the same for all engines, and the token ids that end an answer.

    ``model``: a model of the lab. Raises ConfigError for a problem that is longer than the batch's prompts may be.
    """
    tokenizer, tasks = lab_tokenizer.load(resolve(model)), [load_task(spec) for spec in TASKS[kind]]
    drawn = [tasks[i % len(tasks)].problems("test", 1000 + number * batch.batch + i, 1)[0] for i in range(batch.batch)]
    found = [tokenizer.encode(problem.prompt, add_special_tokens=False).ids for problem in drawn]
    if (longest := max(map(len, found))) > batch.prompt:
        raise ConfigError(
            f"workload {batch.name}: a problem has {longest} tokens: allow prompts of more than {batch.prompt}"
        )
    return found, [tokenizer.token_to_id("<|im_end|>")]
