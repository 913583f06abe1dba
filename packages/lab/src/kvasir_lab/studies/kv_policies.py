"""Measure what forgetting costs in answers: a lab model, every KV policy at several budgets, the same problems.

    python -m kvasir_lab.studies kv_policies RESULT.json [--model base] [--device cpu] [-n 1000] [--budgets 128 256 512]
        [--policies snapkv h2o ...] [--tasks needle ...] [--seconds 480]

A budget is the number of tokens that stay of a prompt. ``unknown:needle:...`` asks the same questions after the text
was forgotten, as a second turn would: the text is the prompt, and the question counts as the answer's beginning. Bytes
are those of a token's keys and values times the tokens that stay, with what the policy stores beside them. The result
is written after each arm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from kvasir.bench.loaded import load_engine
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.models import checkpoint
from kvasir.types import SamplingParams
from kvasir_lab.evaluation.evaluator import Answers, Exam, Plan, prepare, read_tokenizer, run
from kvasir_lab.evaluation.scores import figures
from kvasir_lab.study import Arms, Report, study

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvasir.api.offline.llm import LLM

LENGTH = 4064  # tokens of the prompts
TASKS = (f"needle:min_length={LENGTH},length={LENGTH}", f"unknown:needle:min_length={LENGTH},length={LENGTH}")
ANSWERS = ("state", "chain")  # long answers after short prompts
POLICIES = ("sink_window", "snapkv", "pyramidkv", "cake", "h2o", "h2o,noise=true", "lazy_eviction", "r_kv")
QUESTION = "Tell the secret number"
KEPT = ("exact", "interval", "problems", "tokens_per_reply")


def spec_of(policy: str, budget: int) -> str:
    """The policy with this budget, and the smallest steps that it can take."""
    name, _, more = policy.partition(",")
    window = max(1, min(64, budget // 4))
    options = {
        "sink_window": f"sinks=4,window={budget - 4},slack=16",
        "h2o": f"heavy={budget / 2 / LENGTH},recent={budget / 2 / LENGTH},slack=16",
        "lazy_eviction": f"budget={budget},window={window}",
        "r_kv": f"budget={budget},buffer=16",
    }.get(name, f"budget={budget},window={window}")
    return f"{name}:{options}" + (f",{more}" if more else "")


@study("kv-policies-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    device: str = "cpu",
    n: Annotated[int, "-n", "problems of each task"] = 1000,
    budgets: tuple[int, ...] = (128, 256, 512, 1024),
    short: Annotated[tuple[int, ...], "budgets of tasks with long answers"] = (32, 48, 64),
    policies: tuple[str, ...] = POLICIES,
    tasks: tuple[str, ...] = (*TASKS, *ANSWERS),
    seconds: Annotated[float, "when to stop"] = math.inf,
) -> Arms:
    folder, began = checkpoint.resolve(model), time.monotonic()
    tokenizer = read_tokenizer(folder)
    plans = {task: Plan((task.removeprefix("unknown:"),), count=n, seed=7) for task in tasks}
    exams = {task: prepare(plan, tokenizer)[0] for task, plan in plans.items()}
    for policy, spec, asked, more in arms(tasks, policies, budgets, short):
        if time.monotonic() - began > seconds:
            return
        config = EngineConfig.of(model=str(folder), device=device, kv_policy=spec, gpu_memory_utilization=0.4)
        with load_engine(config) as llm:
            found: dict[str, Any] = {}
            for task in asked:
                ask = asked_later if task.startswith("unknown:") else run
                outcome = figures(ask(llm, exams[task], plans[task], tokenizer))
                found[task] = {name: outcome[name] for name in KEPT if name in outcome}
            found["bytes_a_token"] = llm.engine.runner.pool.bytes_per_token()
            found["forgotten_tokens"] = llm.engine.stats().forgotten_tokens
        yield policy, {"kv_policy": spec, **more}, found


def arms(
    tasks: tuple[str, ...], policies: tuple[str, ...], budgets: tuple[int, ...], short: tuple[int, ...]
) -> Iterator[tuple[str, str, list[str], dict[str, int]]]:
    """Policies, their specs, the tasks that they are asked, and the budget: the whole cache first."""
    answers = [task for task in tasks if task.split(":")[0] in ANSWERS]
    yield "dense", "off", list(tasks), {}
    for asked, sizes in (([task for task in tasks if task not in answers], budgets), (answers, short)):
        for budget in sizes if asked else ():
            for policy in policies:
                yield policy, spec_of(policy, budget), asked, {"budget": budget}


def asked_later(llm: LLM, exam: Exam, plan: Plan, tokenizer: Tokenizer) -> Answers:
    """Ask each question after its text was computed, and forgotten where a policy forgets it."""
    began, texts, tokens = time.perf_counter(), [""] * len(exam.prompts), np.zeros((len(exam.prompts), 1), int)
    stop = tokenizer.token_to_id("<|im_end|>")
    engine, replies = llm.engine, {str(i): [] for i in range(len(exam.prompts))}
    for i, (ids, problem) in enumerate(zip(exam.prompts, exam.problems)):
        at = before_the_question(ids, problem.prompt, tokenizer)
        most = min(len(ids) - at + exam.limit, llm.info.max_model_len - at)
        params = SamplingParams(temperature=0.0, max_tokens=most, stop_token_ids=(stop,))
        request = admit(ids[:at], params, llm.info, id=str(i), arrival=0.0, encode=None)
        request.emitted, request.epoch = [ids[at:]], 1
        collect(engine.submit(request), replies)
    while engine.has_work():
        collect(engine.step(), replies)
    for i, (name, reply) in enumerate(replies.items()):
        texts[int(name)], tokens[i] = tokenizer.decode([t for t in reply if t != stop]), len(reply)
    right = np.array([[exam.task.check(problem, text)] for problem, text in zip(exam.problems, texts)])
    return Answers(exam, right, tokens, [[None]] * len(texts), 0, time.perf_counter() - began, [[t] for t in texts])


def before_the_question(ids: list[int], text: str, tokenizer: Tokenizer) -> int:
    """The number of tokens before the question at the end of a prompt."""
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert whole.ids == ids, "the prompt's own tokens"
    return whole.char_to_token(text.rindex(QUESTION))


def collect(events: list[Any], replies: dict[str, list[int]]) -> None:
    for event in events:
        if event.kind == "error":
            raise RuntimeError(event.message)
        if event.kind == "tokens":
            replies[event.request_id] += event.token_ids
