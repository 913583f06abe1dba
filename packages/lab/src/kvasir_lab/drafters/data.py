"""Training data of drafters: the target's own replies to the lab's problems, sampled once and kept in a file.

On-policy texts matter more than good ones: a drafter must know what this model writes, mistakes included.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from kvasir.errors import ConfigError
from kvasir.plain_files import refuse_special
from kvasir.progress import Progress
from kvasir_lab import sample
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.task import Split
from kvasir_lab.training.recipe import FORMED, FORMS, SOLVE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_PROMPT = 1024
TEMPERATURES = (0.0, 0.7, 1.0)  # The drafter must work at all of these; each gives a third of the replies.
BATCH_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 11}  # Tokens of a batch, by device.
ARRAYS = ("ids", "bounds", "begins", "tasks")
PADDED = 64  # Lengths of a batch are rounded up to a multiple of this many tokens.


def mixture() -> dict[str, float]:
    """The base recipe's tasks and its prompt forms, which get a fifth of the replies."""
    forms = {f"{form}/{task}": 0.2 * share / len(FORMED) for form, share in FORMS.items() for task in FORMED}
    total = sum(SOLVE.values())
    return {spec: 0.8 * share / total for spec, share in SOLVE.items()} | forms


@dataclass(frozen=True, slots=True)
class Texts:
    """N conversations end to end.

    ids [T] int32; bounds [N+1]; begins [N]: number of prompt tokens of each; tasks [N]: indices into ``specs``.
    """

    ids: np.ndarray
    bounds: np.ndarray
    begins: np.ndarray
    tasks: np.ndarray
    specs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def num_replied(self) -> int:
        """Number of tokens in all replies."""
        return int(self.bounds[-1] - self.begins.sum())

    def text(self, i: int) -> np.ndarray:
        return self.ids[self.bounds[i] : self.bounds[i + 1]]


def sample_texts(
    model: Model,
    tokenizer: Tokenizer,
    mix: dict[str, float],
    count: int,
    split: Split,
    seed: int,
    max_new: int,
    say: Callable[[str], None],
    temperatures: Sequence[float] = TEMPERATURES,
) -> Texts:
    """Sample about ``count`` replies of ``model``, shared among the tasks as ``mix`` says.

    A reply cut off at ``max_new`` tokens has no end mark.
    """
    say(f"  sampling about {count} replies of the target ({split})")
    progress = Progress(f"sampling ({split})", brief=True)
    begin = time.monotonic()
    end = tokenizer.token_to_id("<|im_end|>")
    task_of: dict[tuple[int, ...], int] = {}
    for i, (spec, share) in enumerate(mix.items()):
        for problem in load_task(spec).problems(split, seed, max(1, round(count * share))):
            ids = tuple(tokenizer.encode(problem.prompt, add_special_tokens=False).ids)
            if len(ids) <= min(LONGEST_PROMPT, model.shape.positions - max_new):
                task_of.setdefault(ids, i)
    prompts = list(task_of)
    kept: list[tuple[tuple[int, ...], list[int]]] = []

    def complete(
        model: Model, prompts: Sequence[Sequence[int]], max_new: int, stop_ids: Sequence[int], **options: Any
    ) -> list[list[int]]:
        written = sample.complete(model, prompts, max_new, stop_ids, **options)
        kept.extend(
            (tuple(prompt), reply + [end] * (len(reply) < max_new))
            for prompt, reply in zip(prompts, written, strict=True)
        )
        progress.show(len(kept), len(task_of))
        return written

    with progress:
        progress.show(0, len(prompts))
        for n, heat in enumerate(temperatures):
            texts = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in prompts[n :: len(temperatures)]]
            sample.complete_all(model, tokenizer, texts, max_new, temperature=heat, seed=seed + n, complete=complete)
    sizes = [len(prompt) + len(reply) for prompt, reply in kept]
    found = Texts(
        np.array([t for pair in kept for part in pair for t in part], np.int32),
        np.concatenate([[0], np.cumsum(sizes)]),
        np.array([len(prompt) for prompt, _ in kept]),
        np.array([task_of.get(prompt, 0) for prompt, _ in kept]),
        tuple(mix),
    )
    say(f"  {len(found)} replies of the target ({split}), {found.num_replied} tokens, {time.monotonic() - begin:.1f} s")
    return found


def written_texts(
    tokenizer: Tokenizer, mix: dict[str, float], count: int, seed: int, max_new: int, positions: int
) -> Texts:
    """About ``count`` training problems with the replies that the tasks give, shared as ``mix`` says; those longer
    than ``max_new`` tokens are left out."""
    end, kept = tokenizer.token_to_id("<|im_end|>"), []
    for i, (spec, share) in enumerate(mix.items()):
        for problem in load_task(spec).problems("train", seed, max(1, round(count * share))):
            prompt, reply = (
                tokenizer.encode(text, add_special_tokens=False).ids for text in (problem.prompt, problem.solution)
            )
            if len(reply) < max_new and len(prompt) <= min(LONGEST_PROMPT, positions - max_new):
                kept.append((prompt, [*reply, end], i))
    return Texts(
        np.array([t for prompt, reply, _ in kept for t in prompt + reply], np.int32),
        np.cumsum([0, *(len(prompt) + len(reply) for prompt, reply, _ in kept)]),
        np.array([len(prompt) for prompt, _, _ in kept]),
        np.array([i for _, _, i in kept]),
        tuple(mix),
    )


def save_texts(file: Path, texts: dict[str, Texts], weights: str) -> None:
    """Write the texts through a temporary file, so that the file is always whole.

    ``weights``: the target's fingerprint.
    """
    arrays = {
        f"{name}.{field}": np.ascontiguousarray(getattr(t, field)) for name, t in texts.items() for field in ARRAYS
    }
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(
        save(arrays, metadata={"weights": weights, "specs": json.dumps({name: t.specs for name, t in texts.items()})})
    )
    os.replace(temporary, file)


def load_texts(file: Path, weights: str) -> dict[str, Texts]:
    """Read texts back. Raises ConfigError for a broken file or the replies of another model."""
    refuse_special(file)
    try:
        arrays = load_file(file)
        with safe_open(file, "np") as f:
            told = f.metadata() or {}
        specs = json.loads(told["specs"])
        found = {name: Texts(*(arrays[f"{name}.{field}"] for field in ARRAYS), tuple(specs[name])) for name in specs}
    except (OSError, SafetensorError, KeyError, ValueError) as e:
        raise ConfigError(f"{file} holds no replies ({e}): delete it to sample them again") from e
    if told.get("weights") != weights:
        raise ConfigError(f"{file} holds the replies of another model: delete it, or name another file with --samples")
    return found


@dataclass(slots=True)
class Batch:
    """Texts of one batch.

    ids [B, T] int64, padded with 0 on the right; lengths [B] of the texts; begins [B]: lengths of their prompts; texts:
    their numbers.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    begins: torch.Tensor
    texts: np.ndarray


def reply_rows(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Text and position [M] of every row whose next token belongs to a reply."""
    place = torch.arange(batch.ids.shape[1])
    replied = (place >= batch.begins[:, None] - 1) & (place < batch.lengths[:, None] - 1)
    text_of, at = (x.to(device) for x in replied.nonzero(as_tuple=True))
    return text_of, at


def batches(texts: Texts, num_tokens: int, seed: int, epoch: int) -> Iterator[Batch]:
    """Yield every text once, with texts of similar length together.

    A batch has at most ``num_tokens`` places, but at least one text.
    """
    rng = np.random.default_rng([seed, epoch])
    lengths = np.diff(texts.bounds)
    order = np.lexsort((rng.random(len(texts)), -(-lengths // PADDED)))
    groups: list[list[int]] = [[]]
    for i in order.tolist():
        wide = -(-int(lengths[i]) // PADDED) * PADDED
        if groups[-1] and (len(groups[-1]) + 1) * wide > num_tokens:
            groups.append([])
        groups[-1].append(i)
    for g in rng.permutation(len(groups)).tolist():
        chosen = np.array(groups[g])
        wide = -(-int(lengths[chosen].max()) // PADDED) * PADDED
        ids = np.zeros((len(chosen), wide), np.int64)
        for row, i in enumerate(chosen.tolist()):
            ids[row, : lengths[i]] = texts.text(i)
        yield Batch(
            torch.from_numpy(ids), torch.from_numpy(lengths[chosen]), torch.from_numpy(texts.begins[chosen]), chosen
        )
