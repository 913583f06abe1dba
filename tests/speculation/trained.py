"""Heads for the smallest model that were trained for seconds on its replies to four problems, and random heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvasir_lab.drafters.data import Texts
from kvasir_lab.drafters.training import Plan, Trainer, load_target
from kvasir_lab.lookup import load_task
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.engine.driver import Driver

TASKS = ("schema", "chain:min_steps=1,max_steps=2")
OUTPUT = 16
RATE = {"ppd": 0.1}
SHORT = Texts(np.array([1, 2, 3, 4, 5], np.int32), np.array([0, 5]), np.array([2]), np.array([0]), ("none",))


def prompts() -> list[list[int]]:
    tokenizer = shipped_tokenizer()
    return [
        tokenizer.encode(p.prompt, add_special_tokens=False).ids
        for spec in TASKS
        for p in load_task(spec).problems("validation", 0, 2)
    ]


def driver(drafter: str = "", **options) -> Driver:
    return Driver(**({"max_model_len": 128, "drafter": drafter, "draft_control": "fixed"} | options))


def requests(d: Driver, temperature: float, n: int = 1, tag: str = "r", **params) -> list:
    given = dict(temperature=temperature, max_tokens=OUTPUT, ignore_eos=True, n=n) | params
    return [d.request(f"{tag}{k}", ids, seed=50 + k, **given) for k, ids in enumerate(prompts())]


def tokens(d: Driver) -> dict:
    assert not d.errors
    drafting = d.engine.proposals.drafting
    assert drafting is None or not drafting._failures, "the drafter failed: see the log"
    return {key: out.tokens for key, out in d.outputs.items()}


def plain(temperature: float, n: int = 1, codec: str = "plain") -> dict:
    """Return a plain engine: one request at a time, in one chunk, without cache or drafter."""
    d = driver(max_num_batched_tokens=512, max_num_seqs=32, enable_prefix_caching=False, kv_codec=codec)
    for request in requests(d, temperature, n):
        d.run([request])
    d.close()
    return tokens(d)


def trained(kind: str, folder: Path, steps: int) -> Path:
    """Return a folder with a head that has seen the greedy replies to `prompts`."""
    outputs, given = plain(0.0), prompts()
    whole = [ids + outputs[f"r{k}", 0] for k, ids in enumerate(given)]
    texts = Texts(
        np.concatenate(whole).astype(np.int32),
        np.cumsum([0, *map(len, whole)]),
        np.array([len(ids) for ids in given]),
        np.zeros(len(whole), int),
        TASKS,
    )
    torch.manual_seed(0)
    trainer = Trainer(load_target("nano", "cpu")[0], texts, Plan(kind, steps=steps, lr=RATE.get(kind, 4e-3)))
    stream = trainer.stream()
    for _ in range(steps):
        trainer.step(next(stream))
    trainer.kind.write(folder, None)
    return folder


def random_head(kind: str, folder: Path, model: str = "nano") -> Path:
    """Return a head with random weights for a model of the lab."""
    target = load_target(model, "cpu")[0]
    trainer = Trainer(target, SHORT, Plan(kind, steps=1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trainer.kind.module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    trainer.kind.write(folder, None)
    return folder
