"""``kvasir bench turns``: what an agent's turns cost with a prefix cache, and what drafts give on repeated text.

A conversation starts with ``shared`` random tokens, which one request computes. Each turn adds ``new`` tokens, as an
answer and a tool's result would, and asks for one token: the first token of that turn. *Cold* is the first token of
prompts as long that nothing in the cache begins. Each round has another conversation.

Then every arm decodes answers that it has given before, with suffix drafts and without: with random weights a hybrid
repeats nothing by itself (`kvasir.bench.texts`). In bf16 it does not even repeat an earlier answer, because rows that
verify drafts round differently. So our arms load a successor model from disk (`kvasir_lab.bench.successor`): no
rounding changes its answers, and all drafts are right. The rate with drafts is therefore that of full acceptance.
``start_s`` includes reading the weights.

The peer runs the turns alone, on dummy weights: the speed of a turn does not depend on weights. Its options say how it
caches states. An arm is written when it is done, in case the run is cut short. If an arm after the first fails, the
others are still measured.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvasir.bench import texts
from kvasir.bench.compare import kept
from kvasir.bench.result import arm, finish, judged, ratios_of, result, save, spread
from kvasir.bench.worker import Worker, check_peer
from kvasir.bench.workloads import SHAPES, Batch, shape_folder
from kvasir_lab.bench.successor import successor_checkpoint

DRAFTER = "suffix"
# Tokens of a repeated prompt and of its answer, and the batches that decode them.
REPEATED, ANSWER, BATCHES = 1024, 256, (1, 8)
# Bounds of the ratios: a turn's first token to a cold one, and decoding with drafts to decoding without.
TURN, DRAFTED = 0.2, 1.3
# The peer finds prompts with states in its cache only with the first two settings. The third one leaves out its image
# tower. Its usual kernels for such prompts are compiled for minutes at the first one, so it takes those in Triton.
ALIGNED = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "language_model_only": True,
    "gdn_prefill_backend": "triton",
}


def draw(vocab: int, count: int, rng: random.Random) -> list[int]:
    """Random ids, without the first and last 64th of the vocabulary, where special tokens may be."""
    return [rng.randrange(vocab // 64, vocab - vocab // 64) for _ in range(count)]


def conversation(worker: Worker, vocab: int, shared: int, new: int, turns: int, seed: str) -> dict[str, list[float]]:
    """Values of one conversation: ``cold_s`` and ``turn_s`` of every turn, ``hit_tokens`` and ``prompt_tokens``."""
    rng = random.Random(seed)
    found: dict[str, list[float]] = {"cold_s": [], "turn_s": [], "hit_tokens": [], "prompt_tokens": []}
    history = draw(vocab, shared, rng)
    worker.seconds([history], 1)
    for _ in range(turns):
        history = history + draw(vocab, new, rng)
        found["cold_s"].append(worker.seconds([draw(vocab, len(history), rng)], 1))
        found["turn_s"].append(worker.seconds([history], 1))
        found["hit_tokens"].append(worker.counts.get("cached", 0))
        found["prompt_tokens"].append(len(history))
    return found


def measure_turns(
    worker: Worker, vocab: int, shared: int, new: int, turns: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Spreads of ``conversation`` over ``repeats`` conversations, after one that does not count."""
    values: dict[str, list[float]] = {}
    for number in range(1 + repeats):
        for name, part in conversation(worker, vocab, shared, new, turns, f"turns {number}").items():
            values.setdefault(f"turns.{name}", []).extend(part if number else [])
    return {name: spread(part) for name, part in values.items()}


def measure_repeated(worker: Worker, vocab: int, repeats: int, known: texts.Known) -> dict[str, Any]:
    """Decode rates of repeated text, with the counts of drafts. ``known``: outputs of the arm without drafts."""
    found: dict[str, Any] = {}
    for batch in (Batch(f"repeated{n}", n, REPEATED, ANSWER) for n in BATCHES):
        for name, values in texts.life(
            worker, "repeated", batch, texts.Texts("", vocab), repeats, 0, known, again=True
        ).items():
            found[name] = texts.mean(values) if isinstance(values[0], dict) else spread(values)
    return found


def run(
    settings: dict[str, Any],
    *,
    shape: str,
    shared: int,
    new: int,
    turns: int,
    repeats: int,
    peer: str | None,
    site: str | None,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure every arm, show the table and write the result.

    Raises ConfigError before anything is measured, also where the disk has no room for the weights of our arms.
    """
    if peer:
        check_peer(peer, site)
    known: texts.Known = {}
    length = shared + new * turns + 2
    settings = {"max_model_len": max(length, REPEATED + ANSWER), "enable_prefix_caching": True, **settings}
    plans = [("kvasir", "kvasir", settings), (DRAFTER, "kvasir", settings | {"drafter": DRAFTER})]
    if peer:
        common = {k: v for k, v in settings.items() if k in ("max_model_len", "max_num_seqs", "gpu_memory_utilization")}
        plans.append((peer, peer, common | (ALIGNED if peer == "vllm" else {})))
    entries: list[dict[str, Any]] = []
    with shape_folder(shape) as bare, successor_checkpoint(shape) as written:  # both refuse an unknown shape
        vocab = SHAPES[shape]["vocab_size"]
        for name, engine, options in plans:
            ours = engine == "kvasir"
            folder, own = (written, {"skip_tokenizer_init": True}) if ours else (bare, {"load_format": "dummy"})
            with (
                kept(lambda: entries) as state,
                Worker(engine, folder, own | options, None if ours else site) as worker,
            ):
                metrics: dict[str, Any] = {"start_s": worker.facts["start_s"]}
                if "state_share" in worker.facts:
                    metrics["state_share"] = round(worker.facts["state_share"], 4)
                if name != DRAFTER:
                    metrics |= measure_turns(worker, vocab, shared, new, turns, repeats)
                if ours:
                    metrics |= measure_repeated(worker, vocab, repeats, known)
                facts = {"version": worker.facts["version"]} if "version" in worker.facts else {}
                config = {"shape": shape, "shared": shared, "new": new, **options} if not entries else options
                entries.append(arm(name, config | facts, metrics))
                save(_result(shape, entries), output, commit)
            if state.told_to_end:
                break
    finish(_result(shape, entries), output, commit)


def _result(shape: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of the arms so far, with the turn's share of a cold first token as a ratio of each arm."""
    names = [entry["name"] for entry in entries]
    ratios = ratios_of(entries, [(DRAFTER, "kvasir")] if DRAFTER in names else [])
    ratios |= ratios_of(entries, [("kvasir", names[-1])] if names[-1] not in ("kvasir", DRAFTER) else [])
    for entry in entries:
        metrics = entry["metrics"]
        if "turns.cold_s" in metrics:
            share = metrics["turns.turn_s"]["median"] / max(metrics["turns.cold_s"]["median"], 1e-9)
            ratios[f"first_token turn/cold {entry['name']}"] = round(share, 3)
    targets = judged({"first_token turn/cold": {"at_most": TURN}}, ratios, "kvasir")
    drafted = {f"repeated{n}.decode_tok_s": {"at_least": DRAFTED} for n in BATCHES}
    return result(
        f"turns-{shape}", entries, ratios=ratios, targets=targets | judged(drafted, ratios, f"{DRAFTER}/kvasir")
    )
