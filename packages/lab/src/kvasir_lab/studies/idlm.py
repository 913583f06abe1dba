"""Measure I-DLM's mask rows on a GPU with real rows, a real adapter and a set acceptance.

    python -m kvasir_lab.studies idlm OUT.json [--shape llama-8b] [--batch 1 --batch 4 ...]

Weights and adapter are random, so what mask rows draw means nothing. Where they drew something, the drafter proposes
the tokens of a plain run instead, each spoiled with probability 1 - accept. Everything else is as in serving: mask
rows, their adapter, their draws, what the controller decides. The temperature is high, as in `kvasir bench
speculation`.

Arms, by batch: ``plain`` (an engine without a drafter), ``zero`` (an engine with the drafter's slot, drafts off),
chains and trees of which all are verified, ``chain_bare`` (the same rows without the adapter), and what the controller
makes of it (``goodput``).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save_file

from kvasir import LLM, SamplingParams
from kvasir.bench.result import arm, finish, result, spread
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.kernels.guess import guess_rows, guess_rows_ref
from kvasir.speculation.controller import Controller
from kvasir.speculation.self_drafter import SelfDrafter
from kvasir_lab.studies.adapters import matrices
from kvasir_lab.study import Report, study

ALPHA_OF_RANK = 2
TEMPERATURE = 10.0
PROMPT = 256


def write(folder: Path, shape: str, rank: int, stride: int) -> None:
    """Write the folder of a drafter with random weights."""
    config, tensors = SHAPES[shape], {}
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).bfloat16()

    def some(*size: int, scale: float) -> torch.Tensor:
        count = size[0] * size[1]
        return (noise.repeat(-(-count // len(noise)))[:count].view(size) * scale).contiguous()

    for module, (outputs, inputs) in matrices(shape).items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = some(rank, inputs, scale=inputs**-0.5)
        tensors[f"{name}.lora_B.weight"] = some(outputs, rank, scale=0.01)
    tensors["mask_embedding"] = noise[: config["hidden_size"]].clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    target = {"name": shape, "hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    target |= {"num_layers": config["num_hidden_layers"], "weights": "random"}
    told = {"kind": "idlm", "target": target, "stride": stride, "mask_token_id": None}
    (folder / "config.json").write_text(json.dumps(told | {"rank": rank, "alpha": ALPHA_OF_RANK * rank}))


def script(drafter: SelfDrafter, told: dict[tuple[int, ...], list[int]], accept: float) -> None:
    """Let the drafter propose the tokens of a plain run wherever its masks drew something."""
    real = drafter.guesses_of

    def guesses_of(seq: Any) -> list[list[tuple[int, float]]]:
        rows = real(seq)
        key = tuple(seq.request.prompt_ids)
        if not rows or key not in told:
            return rows
        if "scripted" not in seq.state:
            rng = random.Random(seq.request.seed)
            seq.state["scripted"] = [token if rng.random() < accept else token ^ 1 for token in told[key]]
        after = seq.state["scripted"][seq.num_output : seq.num_output + len(rows)]
        return [[(token, accept)] for token in after]

    drafter.guesses_of = guesses_of  # type: ignore[method-assign]


def rounds(llm: LLM, prompts: list[list[int]], tokens: int, count: int) -> tuple[list[float], dict[str, Any], list]:
    """Seconds of ``count`` rounds after a warm one, figures of the counted ones, and the last outputs."""
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True, seed=i, detokenize=False)
        for i in range(len(prompts))
    ]
    seconds, before = [], llm.engine.stats()
    for r in range(count + 1):
        if r == 1:
            before = copy.deepcopy(llm.engine.stats())
        began = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        seconds.append(time.perf_counter() - began)
    outputs, stats = [list(out.outputs[0].token_ids) for out in found], llm.engine.stats()
    steps = max(1, stats.step - before.step)
    figures = {
        "step_ms": round(1e3 * sum(seconds[1:]) / steps, 4),
        "tokens_per_forward": round(
            (stats.generation_tokens - before.generation_tokens) / max(1, stats.forwards - before.forwards), 4
        ),
        "drafted": stats.drafted_tokens - before.drafted_tokens,
        "accepted": stats.accepted_tokens - before.accepted_tokens,
    }
    return seconds[1:], figures, outputs


def prompts_of(shape: str, batch: int) -> list[list[int]]:
    rng = random.Random(batch)
    return [[rng.randrange(3, SHAPES[shape]["vocab_size"] - 3) for _ in range(PROMPT)] for _ in range(batch)]


def check_kernel() -> dict[str, float]:
    """Compare the kernel of guesses with its reference, and time it over 64 rows of a large vocabulary."""
    device, rows, vocab = torch.device("cuda"), 64, 128256
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).bfloat16().to(device)
    token = logits.float().argmax(-1).float()
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0]).repeat(rows // 4).to(device)
    streams, positions = torch.arange(rows, device=device) * 7919, torch.arange(rows, device=device) + 5
    wanted = (torch.arange(rows, device=device) % 5) > 0
    worst = 0.0
    for count in (1, 4):
        given = logits, token, temperature, streams, positions, wanted, vocab, count
        ours, want = guess_rows(*given), guess_rows_ref(*given)
        assert torch.equal(ours[:count, wanted], want[:count, wanted]), "the kernel guesses other tokens"
        worst = max(worst, float((ours[count:, wanted] / want[count:, wanted].clamp(min=1e-30) - 1).abs().max()))
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            guess_rows(logits, token, temperature, streams, positions, wanted, vocab, 1)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 10)
    return {"guess_us": round(1e6 * min(times), 2), "guess_largest_relative_error": worst}


def measure(options: argparse.Namespace) -> None:
    arms: list[dict[str, Any]] = []
    setting = {name: getattr(options, name) for name in ("shape", "accept", "stride", "rank", "tokens", "repeats")}
    settings = {"max_num_seqs": max(options.batch), "max_model_len": 1024, "enable_prefix_caching": False}
    settings |= {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": 8192}
    if options.threads:
        settings["num_threads"] = options.threads

    def book(name: str, batch: int, seconds: list[float], prefill: float, figures: dict[str, Any]) -> float:
        rates = [batch * (options.tokens - 1) / max(1e-9, s - prefill) for s in seconds]
        known = {a["name"]: a["metrics"] for a in arms}
        if name != "plain":
            usual = known[f"plain {batch}"]["decode_tok_s"]["median"]
            figures = figures | {"of_plain": round(statistics.median(rates) / usual, 4)}
        arms.append(arm(f"{name} {batch}", setting | {"batch": batch}, figures | {"decode_tok_s": spread(rates)}))
        print(f"{name} {batch}: {figures}", flush=True)
        return statistics.median(rates)

    plain: dict[int, tuple[list[list[int]], list[list[int]], float]] = {}
    with shape_folder(options.shape) as model, tempfile.TemporaryDirectory() as masks:
        write(Path(masks), options.shape, options.rank, options.stride)
        with LLM(model=model, **settings) as llm:
            for batch in options.batch:
                prompts = prompts_of(options.shape, batch)
                rounds(llm, prompts, options.tokens, 0)
                prefill = statistics.median(rounds(llm, prompts, 1, options.repeats)[0])
                seconds, figures, outputs = rounds(llm, prompts, options.tokens, options.repeats)
                plain[batch] = prompts, outputs, prefill
                book("plain", batch, seconds, prefill, figures)
        torch.cuda.empty_cache()
        drafter = f"idlm:model={masks},stride={options.stride}"
        with LLM(model=model, drafter=drafter, draft_control="fixed", **settings) as llm:
            engine = llm.engine
            drafting, own = engine.proposals.drafting, engine.proposals.drafting.drafter
            script(own, {tuple(p): o for ps, outs, _ in plain.values() for p, o in zip(ps, outs)}, options.accept)
            variant, config, control = own.guest_variant, own.config, drafting._config
            fixed = drafting.controller
            for batch in options.batch:
                prompts, _, prefill = plain[batch]
                engine.bind_parts(None)
                book("zero", batch, *rounds(llm, prompts, options.tokens, options.repeats)[:1], prefill, {})
                engine.bind_parts(drafting)
                for name, layout, adapted, controller in (
                    ("chain", "chain", True, fixed),
                    ("chain_bare", "chain", False, fixed),
                    ("tree", "tree", True, fixed),
                    ("goodput", "auto", True, Controller(drafting._times.predict)),
                ):
                    own.config = type(config)(config.model, options.stride, layout, False)
                    own.guest_variant = variant if adapted else 0
                    drafting.controller = controller
                    drafting._config = control if controller is fixed else type(control)(draft_control="goodput")
                    warm = 2 if name == "goodput" else 1
                    for _ in range(warm):
                        rounds(llm, prompts, options.tokens, 0)
                    seconds, figures, _ = rounds(llm, prompts, options.tokens, options.repeats)
                    book(name, batch, seconds, prefill, figures)
                own.guest_variant = variant
    by = {a["name"]: a["metrics"] for a in arms}
    figures = check_kernel() if torch.cuda.is_available() else {}
    for batch in options.batch:
        figures[f"adapter share {batch}"] = round(
            1 - by[f"chain_bare {batch}"]["step_ms"] / by[f"chain {batch}"]["step_ms"], 4
        )
        figures[f"step ratio {batch}"] = round(by[f"chain {batch}"]["step_ms"] / by[f"plain {batch}"]["step_ms"], 4)
    arms.append(arm("derived", setting, figures))
    ratios = {f"decode_tok_s {a['name']}/plain": a["metrics"]["of_plain"] for a in arms if "of_plain" in a["metrics"]}
    finish(result(f"idlm-{options.shape}", arms, ratios=ratios), options.output, options.commit)


@study("idlm-{shape}")
def main(
    report: Report,
    *,
    shape: Annotated[str, sorted(SHAPES)] = "llama-8b",
    batch: tuple[int, ...] = (1, 4, 16, 64),
    accept: float = 0.9,
    stride: int = 4,
    rank: int = 128,
    tokens: int = 128,
    repeats: int = 2,
    threads: Annotated[int, "on a CPU"] = 0,
) -> None:
    options = report.options
    measure(options)
