"""Batched decoding of a lab model in plain torch with a KV cache: greedy for scores, sampled for training candidates.

Prompts of similar length share a batch. Finished rows leave it, so that a few long replies do not hold up thousands.

Shape suffixes: B prompts at once, T tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvasir.logs import log
from kvasir.progress import Progress
from kvasir_lab.model import Model
from kvasir_lab.tokenizer import STOPS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOOK = 16  # Tokens between two looks at which rows are done.
# Positions (rows x length) that a batch holds at once. On a CPU the cache is the limit, on a GPU memory: 8 GiB for
# `base`, since trainings may share a GPU with each other and with engines.
POSITIONS = {"cuda": 1 << 20, "cpu": 1 << 15}


def serving_copy(model: Model) -> Model:
    """A copy of the weights as they are served: bf16 on a GPU, fp32 elsewhere."""
    device = model.model.embed_tokens.weight.device
    return (
        copy.deepcopy(model).to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval().requires_grad_(False)
    )


class _Rows:
    """A batch in flight: its cache, and the last token of each row. Prompts are padded on the left."""

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], max_new: int, pick: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.model, self.pick = model, pick
        self.device = model.model.embed_tokens.weight.device
        wide = self.at = max(map(len, prompts))
        self.padding = torch.tensor([wide - len(p) for p in prompts], device=self.device)
        ids = torch.tensor([[0] * (wide - len(p)) + list(p) for p in prompts], device=self.device)
        # rows of the mask fill whole 32 bytes, which fused attention needs to be fast
        length = -(-(wide + max_new) // 16) * 16
        self.columns = torch.arange(length, device=self.device)
        # place of the next token, which the graph reads
        self.place = torch.zeros(1, dtype=torch.long, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graphs = self.device.type == "cuda"
        self.cache = model.new_cache(len(prompts), length)
        mask = None
        if int(self.padding.max()):
            # A padded column sees itself only, because a row that sees nothing would be NaN.
            square = torch.ones(wide, wide, dtype=torch.bool, device=self.device)
            visible = self.columns[None, :wide] >= self.padding[:, None]
            mask = ((visible[:, None] & square.tril()) | (square.tril() & square.triu()))[:, None]
        positions = (self.columns[None, :wide] - self.padding[:, None]).clamp(min=0)
        self.last = pick(model(ids, mask, positions=positions, cache=self.cache, last=True)[:, -1])

    def step(self) -> None:
        """Append one token to every row."""
        self.place.fill_(self.at)
        if self.graphs and self.graph is None:
            self._capture()
        if self.graph is None:
            self.logits = self._forward()
        else:
            self.graph.replay()
        self.last.copy_(self.pick(self.logits))
        self.at += 1

    def _forward(self) -> torch.Tensor:
        """Logits [B, V] after ``last``, in shapes that do not change from token to token."""
        mask = ((self.columns >= self.padding[:, None]) & (self.columns <= self.place))[:, None, None]
        return self.model(
            self.last[:, None], mask, positions=(self.place - self.padding)[:, None], cache=self.cache, at=self.place
        )[:, -1]

    def _capture(self) -> None:
        """Capture the forward pass: one launch a token instead of hundreds.

        The runs before and during the capture write what the replay writes again. States move on with every run, so
        they are put back.
        """
        states = [x for layer, pair in zip(self.model.model.layers, self.cache) if layer.recurs for x in pair]
        before = [x.clone() for x in states]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.logits = self._forward()
        except RuntimeError as e:  # slow sampling is better than ending the run here
            log.warning("sampling without a CUDA graph: %s", e)
            self.graphs = False
        else:
            self.graph = graph
        for x, kept in zip(states, before):
            x.copy_(kept)

    def keep(self, index: torch.Tensor) -> None:
        """Keep the rows at ``index`` only."""
        self.graph = None
        for i, (k, v) in enumerate(self.cache):  # one after the other, so that only one layer is there twice
            self.cache[i] = (k[index], v[index])
        self.padding, self.last = self.padding[index], self.last[index]


@torch.inference_mode()
def complete(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    stop_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue every prompt (ids) in one batch; the stop token is left out. ``temperature`` 0 is greedy.

    Raises ValueError when the longest prompt leaves no room in the model's positions.
    """
    wide = max(map(len, prompts))
    max_new = min(max_new, model.shape.positions - wide)
    if max_new < 1:
        raise ValueError(f"a prompt of {wide} tokens leaves no room in {model.shape.positions} positions")

    def pick(logits: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]

    batch = _Rows(model, prompts, max_new, pick)
    stops = torch.tensor(list(stop_ids), device=batch.device)
    written = torch.full((len(prompts), max_new), -1, device=batch.device)
    written[:, 0] = batch.last
    open_rows, done = torch.arange(len(prompts), device=batch.device), torch.isin(batch.last, stops)
    for n in range(1, max_new):
        if n % LOOK == 0:
            left = (~done).nonzero()[:, 0]
            if not len(left):
                break
            if len(left) < 0.6 * len(done):
                batch.keep(left)
                open_rows, done = open_rows[left], done[left]
        batch.step()
        written[open_rows, n] = batch.last
        done |= torch.isin(batch.last, stops)
    ends = {-1, *stop_ids}
    return [row[: next((i for i, t in enumerate(row) if t in ends), len(row))] for row in written.tolist()]


def complete_all(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    complete: Callable[..., list[list[int]]] = complete,
) -> list[str | None]:
    """Replies (text without special tokens) to any number of prompts, in batches that fit the device.

    None: the prompt leaves no room for a reply.
    """
    coded = [e.ids for e in tokenizer.encode_batch_fast(list(prompts), add_special_tokens=False)]
    stop_ids = [tokenizer.token_to_id(t) for t in STOPS]
    found = continue_all(model, coded, max_new, stop_ids, temperature=temperature, seed=seed, complete=complete)
    replies: list[str | None] = [None] * len(found)
    known = [i for i, ids in enumerate(found) if ids is not None]
    texts = tokenizer.decode_batch([found[i] or [] for i in known], skip_special_tokens=True)
    for i, text in zip(known, texts, strict=True):
        replies[i] = text
    return replies


def counted(total: int, progress: Progress) -> Callable[..., list[list[int]]]:
    """`complete` that shows how many of ``total`` texts are done."""
    progress.show(0, total)

    def shown(model: Model, prompts: Sequence[Sequence[int]], *given: Any, **options: Any) -> list[list[int]]:
        written = complete(model, prompts, *given, **options)
        progress.show(progress.done + len(prompts), total)
        return written

    return shown


def continue_all(
    model: Model,
    coded: Sequence[Sequence[int]],
    max_new: int,
    stop_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    complete: Callable[..., list[list[int]]] = complete,
) -> list[list[int] | None]:
    """Continue any number of texts (ids), in batches that fit the device; stop tokens are left out.

    None: the text leaves no room.
    """
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    replies: list[list[int] | None] = [None] * len(coded)
    waiting = sorted(
        (i for i, ids in enumerate(coded) if len(ids) < model.shape.positions), key=lambda i: len(coded[i])
    )
    while waiting:
        count, shortest = 1, len(coded[waiting[0]])
        while count < len(waiting):
            longest = len(coded[waiting[count]])
            # The longest prompt sets the batch's width, which must not take the room of a shorter prompt's reply.
            if (count + 1) * (longest + max_new) > POSITIONS[device.type] or longest > max(
                shortest, model.shape.positions - max_new
            ):
                break
            count += 1
        chosen, waiting = waiting[:count], waiting[count:]
        new = complete(
            model, [coded[i] for i in chosen], max_new, stop_ids, temperature=temperature, generator=generator
        )
        for i, ids in zip(chosen, new, strict=True):
            replies[i] = ids
    return replies
