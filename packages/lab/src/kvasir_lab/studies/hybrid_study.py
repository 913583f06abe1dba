"""Compare a hybrid of the lab with `base` on all tasks, and measure what states in bf16 change.

    python -m kvasir_lab.studies hybrid_study OUT.json --hybrid FOLDER [--base base] [--only needle --only drift]
        [--minutes 9]
    python -m kvasir_lab.studies hybrid_study OUT.json --speed

Parts are *needle* (five depths at each of four lengths), *tasks*, *drift*, *bf16-needle* and *bf16-tasks* (the hybrid
alone, with ``--state-dtype bfloat16``), *harder* and *prose*, in this order, so that a run that is cut has what matters
most. Every part is measured through the engine with ``kvasir eval``, except the drift. OUT.json is written after each
part; a part that it holds is not measured again, and one that would begin after ``--minutes`` is left to the next call.
Where an evaluation fails, the other parts are still measured, and the exit status is 1.

*Drift*: held-out prose is read token by token in plain torch, once with states in fp32 and once with states rounded to
bf16 after every token, as a decode step would store them. ``kl`` is the mean divergence of the two distributions in
nats, ``same`` the share of equal likeliest tokens, and ``loss`` the mean negative log-probability, by position.

*Speed* needs no trained hybrid: it times steps of ``--recipe`` on this machine, with recurrent layers by fla-core's
kernels and by plain products, and lists the five kernels that take longest in each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from kvasir.bench.result import arm, result, write_json
from kvasir.errors import ConfigError
from kvasir_lab.study import Report, study

HARD = "chain:modulus=499,max_factor=30,max_steps=10"
NEEDLES = ",".join(
    f"needle:min_length={length},length={length},depth={depth}"
    for length in (512, 1024, 2048, 4064)
    for depth in (0, 0.25, 0.5, 0.75, 1)
)
TASKS = (
    f"chain,{HARD},long_add,countdown,path,path:form=star,path:max_depth=4,facts,state,state:kind=parity,schema,tool"
)
HARDER = (
    "countdown:min_numbers=4,path:min_depth=4,path:min_depth=5,facts:min_hops=4,min_facts=24,think=no,"
    "state:min_every=3,state:min_every=4"
)
# Name of a part: its tasks, and problems of each.
EVALUATED = {
    "needle": (NEEDLES, 40),
    "tasks": (TASKS, 600),
    "harder": (HARDER, 600),
    "prose": ("story:form=prose,length=1024,template", 11),
}
# Parts of the hybrid alone: with its states in bf16, and plain torch.
ROUNDED = {f"bf16-{part}": part for part in ("needle", "tasks")}
ALONE = (*ROUNDED, "drift")
PARTS = ("needle", "tasks", "drift", *ROUNDED, "harder", "prose")
# Pages of the engine's pool, as in tools/eval_lab.sh: a share of the memory would depend on the machine.
PAGES = 65536
# Texts of the drift, their tokens, and the tokens that a row of its table covers.
TEXTS, LENGTH, SPAN = 16, 2048, 256
# Batches of the speed, and most ready documents of a source for them: all would take longer to make than to train.
BATCHES, POOL = 3, 50


def evaluate(model: str, part: str, problems: int | None, device: str | None) -> dict[str, Any]:
    """Metrics of ``kvasir eval`` by task."""
    tasks, usual = EVALUATED[ROUNDED.get(part, part)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "eval.json"
        command = [
            sys.executable,
            "-m",
            "kvasir.cli.main",
            "eval",
            model,
            "--tasks",
            tasks,
            "-n",
            str(problems or usual),
        ]
        command += ["--json", str(output)]
        command += ["--device", device] if device else []
        command += ["--state-dtype", "bfloat16"] if part in ROUNDED else []
        if device != "cpu":
            command += ["--max-num-seqs", "512", "--num-gpu-blocks-override", str(PAGES)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())["arms"][0]["metrics"]


def drift(folder: str, device: str, texts: int, length: int) -> dict[str, Any]:
    """Rows of the drift by the position of their last token."""
    import torch

    from kvasir_lab import export
    from kvasir_lab import tokenizer as lab_tokenizer
    from kvasir_lab.training.data import Mixture, Rows

    model, tokenizer = export.load(folder, device), lab_tokenizer.load(folder)
    rows = (Rows(texts, length, {f"story:form=prose,length={length}": 1.0}, whole=True),)
    ids = torch.from_numpy(Mixture(rows, tokenizer, 1, split="test").batch(0)[0].ids).long().to(device)
    exact, rounded = (model.new_cache(texts, length) for _ in range(2))
    sums = torch.zeros(length - 1, 4, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for t in range(length - 1):
            both = [
                model(ids[:, t : t + 1], cache=cache, at=t)[:, 0].float().log_softmax(-1) for cache in (exact, rounded)
            ]
            for layer, (state, _) in zip(model.model.layers, rounded):
                if layer.recurs:
                    state.copy_(state.bfloat16())
            a, b = both
            losses = [-x.gather(1, ids[:, t + 1 : t + 2]).mean() for x in both]
            kl = (a.exp() * (a - b)).sum(-1).mean()
            sums[t] = torch.stack((kl, (a.argmax(-1) == b.argmax(-1)).float().mean(), *losses))
    found: dict[str, Any] = {}
    for first in range(0, length - 1, SPAN):
        kl, same, plain, low = sums[first : first + SPAN].mean(0).tolist()
        found[f"to {min(first + SPAN, length - 1)}"] = {
            "kl": round(kl, 8), "same": round(same, 5), "loss": round(plain, 5), "loss_bf16": round(low, 5)
        }  # fmt: skip
    return found


def step_times(trainer: Any, batches: list[Any], steps: int) -> dict[str, Any]:
    """Times of training steps that take ``batches`` in turn: tokens a second, ms, and ms of the longest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = trainer.device.type == "cuda"

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = wait()
    trainer.first_step(batches[0], print)
    first = wait() - begin
    for batch in batches:
        trainer.step(batch)
    tokens, begin = trainer.tokens, wait()
    for number in range(steps):
        trainer.step(batches[number % len(batches)])
    spent = wait() - begin
    found = {
        "tokens_per_s": round((trainer.tokens - tokens) / spent),
        "step_ms": round(spent / steps * 1e3, 2),
        "first_step_s": round(first, 2),
    }
    if cuda:
        found["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        trainer.step(batches[0])
        wait()
    by_kernel = {
        f"{e.key[:60]} x{e.count}": (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e3
        for e in profiler.key_averages()
    }
    longest = sorted(by_kernel.items(), key=lambda item: -item[1])[:5]
    found["kernels_ms"] = round(sum(by_kernel.values()), 2)
    found["longest_ms"] = {name: round(ms, 2) for name, ms in longest}
    return found


def speed(out: Path, recipe_name: str, device: str, steps: int) -> None:
    """Write OUT.json with an arm for each way to compute recurrent layers that works here."""
    import torch

    from kvasir_lab.fused import why_no_chunks, why_not
    from kvasir_lab.model import PLAIN, compiled
    from kvasir_lab.tokenizer import shipped_tokenizer
    from kvasir_lab.training.recipe import find
    from kvasir_lab.training.trainer import Trainer

    cuda, began = device.startswith("cuda"), time.monotonic()
    recipe = find(recipe_name)
    recipe = recipe.replace(pool=min(recipe.pool or POOL, POOL))
    workers = max(1, (os.cpu_count() or 4) - 2) if cuda else 0
    trainer = Trainer(recipe, shipped_tokenizer(), device, workers=workers)
    batches = [trainer.mixture.batch(number) for number in range(BATCHES)]
    print(f"data ready after {time.monotonic() - began:.0f} s", flush=True)
    dtype, arms = torch.bfloat16 if cuda else torch.float32, []
    fused = cuda and why_not(recipe.shape, device) is None
    for name in ("fla", "plain"):
        reason = why_no_chunks(recipe.shape, device, dtype) if name == "fla" else None
        if reason is not None:
            print(f"{name}: {reason}", flush=True)
            continue
        print(f"{name}: tried after {time.monotonic() - began:.0f} s", flush=True)
        torch.compiler.reset()
        trainer.compute = compiled(fused=fused) if cuda else PLAIN
        trainer.model.train_by_chunks(dtype if name == "fla" else None)
        metrics = step_times(trainer, batches, steps)
        shared = {"recipe": recipe.name, "tokens_of_a_step": recipe.tokens_per_step, "steps": steps, "fused": fused}
        arms.append(arm(name, {"recurrence": name} | ({} if arms else shared), metrics))
        write_json(out, result("hybrid-speed", arms))
        rate = metrics["tokens_per_s"]
        print(
            f"{name}: {rate:,} tokens/s; 10 minutes are {600e3 / metrics['step_ms']:,.0f} steps of "
            f"{rate * 600 / 1e6:,.0f}M tokens in all; the first step took {metrics['first_step_s']} s",
            *(f"  {ms:9.2f} ms  {kernel}" for kernel, ms in metrics["longest_ms"].items()),
            f"  {metrics['kernels_ms']:9.2f} ms  all kernels of one step",
            sep="\n",
            flush=True,
        )


@study("hybrid-study", needs_file=True)
def main(
    report: Report,
    *,
    hybrid: Annotated[str | None, "folder of a trained hybrid"] = None,
    fast: Annotated[bool, "--speed", "time training steps, and nothing else"] = False,
    recipe: Annotated[str, "of the speed"] = "base-hybrid",
    steps: Annotated[int, "timed steps of the speed"] = 6,
    base: Annotated[str, "model to compare with"] = "base",
    only: Annotated[tuple[str, ...], PARTS, "measure these parts only"] = (),
    minutes: Annotated[float, "begin no part after so many minutes"] = 1e9,
    problems: Annotated[int | None, "problems of each task, for a dry run"] = None,
    texts: int = TEXTS,
    length: Annotated[int, "tokens of a text of the drift"] = LENGTH,
    device: Annotated[str | None, "cuda or cpu; default: the GPU when there is one"] = None,
) -> int:
    options = report.options
    if options.fast:
        import torch

        speed(
            options.output,
            options.recipe,
            options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            options.steps,
        )
        return 0
    if options.hybrid is None:
        raise ConfigError("give --hybrid FOLDER, or --speed")
    began, failed = time.monotonic(), False
    done = {a["name"]: a for a in json.loads(options.output.read_text())["arms"]} if options.output.exists() else {}
    for part in options.only or PARTS:
        for name, model in (("base-hybrid", options.hybrid), ("base", options.base)):
            key = f"{name} {part}"
            if key in done or (part in ALONE and name == "base"):
                continue
            if time.monotonic() - began > options.minutes * 60:
                print(f"{key}: left to the next call", flush=True)
                continue
            begin = time.monotonic()
            if part == "drift":
                import torch

                device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
                config = {"texts": options.texts, "length": options.length}
                metrics = drift(options.hybrid, device, options.texts, options.length)
            else:
                tasks, usual = EVALUATED[ROUNDED.get(part, part)]
                config = {"tasks": tasks, "problems": options.problems or usual}
                try:
                    metrics = evaluate(model, part, options.problems, options.device)
                except subprocess.CalledProcessError as e:
                    failed = True
                    print(f"{key}: failed with exit status {e.returncode}; its messages are above", flush=True)
                    continue
            done[key] = arm(key, {"model": Path(model).name, **config}, metrics)
            found = result("hybrid-study", list(done.values()))
            if (record := Path(options.hybrid) / "training.json").exists():
                told = json.loads(record.read_text())
                kept = ("command", "commit", "parameters", "steps", "tokens", "train_seconds", "device")
                found["trained"] = {k: told[k] for k in kept if k in told}
            write_json(options.output, found)
            print(f"{key}: {time.monotonic() - begin:.0f} s", flush=True)
    return int(failed)
