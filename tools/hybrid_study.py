"""Compare a hybrid of the lab with `base` on all tasks, and measure what states in bf16 change.

    python tools/hybrid_study.py OUT.json --hybrid FOLDER [--base base] [--only needle --only drift] [--minutes 9]

Parts are *needle* (five depths at each of four lengths), *tasks*, *harder*, *prose*, *bf16-needle* and *bf16-tasks*
(the hybrid alone, with ``--state-dtype bfloat16``), and *drift*. Every part is measured through the engine with
``kvasir eval``, except the drift. OUT.json is written after each part; a part that it holds is
not measured again, and one that would begin after ``--minutes`` is left to the next call.

*Drift*: held-out prose is read token by token in plain torch, once with states in fp32 and once with states rounded to
bf16 after every token, as a decode step would store them. ``kl`` is the mean divergence of the two distributions in
nats, ``same`` the share of equal likeliest tokens, and ``loss`` the mean negative log-probability, by position.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from kvasir.bench.result import arm, as_json, result  # noqa: E402

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
PARTS = (*EVALUATED, *ALONE)
# Pages of the engine's pool, as in tools/eval_lab.sh: a share of the memory would depend on the machine.
PAGES = 65536
# Texts of the drift, their tokens, and the tokens that a row of its table covers.
TEXTS, LENGTH, SPAN = 16, 2048, 256


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

    from kvasir.lab import export
    from kvasir.lab import tokenizer as lab_tokenizer
    from kvasir.lab.training.data import Mixture, Rows

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hybrid", required=True, help="folder of a trained hybrid")
    parser.add_argument("--base", default="base", help="model to compare with")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure these parts only")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no part after so many minutes")
    parser.add_argument("--problems", type=int, help="problems of each task, for a dry run")
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a text of the drift")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU when there is one")
    options = parser.parse_args()
    began = time.monotonic()
    done = {a["name"]: a for a in json.loads(options.out.read_text())["arms"]} if options.out.exists() else {}
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
                metrics = evaluate(model, part, options.problems, options.device)
            done[key] = arm(key, {"model": Path(model).name, **config}, metrics)
            found = result("hybrid-study", list(done.values()))
            if (record := Path(options.hybrid) / "training.json").exists():
                told = json.loads(record.read_text())
                kept = ("command", "commit", "parameters", "steps", "tokens", "train_seconds", "device")
                found["trained"] = {k: told[k] for k in kept if k in told}
            options.out.write_text(as_json(found))
            print(f"{key}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
