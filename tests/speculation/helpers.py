"""Requests of ordinary and of repetitive text on the smallest model, and a drafter whose proposals are hardest to
verify.
"""

from __future__ import annotations

import random

import torch

from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from tests.engine.driver import Driver

NANO = "nano"
LENGTHS = [5, 18, 33, 50]
OUTPUT = 10
FEW = [310, 311, 312, 313]


class Hostile(Drafter):
    """Propose trees with decoys before, beside and below the right tokens, which the drafter is told.

    The accepted path leaves the leftmost one, so slots must move. Sometimes a tree is a single decoy, sometimes it is
    empty."""

    topology = "tree"

    def __init__(self, outputs: dict[tuple[str, int], list[int]], seed: int = 0) -> None:
        super().__init__()
        self.outputs, self.rng = outputs, random.Random(seed)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> DraftTree:
        seq, rng, tree = ask.seq, self.rng, DraftTree()
        right = self.outputs[seq.request.id, seq.branch][seq.num_output :]
        if rng.random() < 0.1:
            return tree
        node = -1
        for token in right[: rng.randint(0, ask.max_depth)]:
            for _ in range(rng.randint(0, 2)):
                if len(tree) < ask.max_nodes - 1:
                    decoy = tree.add(node, token ^ rng.randint(1, 3), 0.9)
                    if rng.random() < 0.5 and len(tree) < ask.max_nodes - 1:
                        tree.add(decoy, token, 0.9)
            if len(tree) == ask.max_nodes or rng.random() < 0.2:  # the right one is missing
                break
            node = tree.add(node, token, rng.random())
        return tree.keep(range(len(tree)))


class WithGuests(Hostile):
    """Propose the same trees with guests of random, loud embeddings behind some nodes, at times several chains; also
    behind the anchor without a tree."""

    def __init__(self, outputs: dict[tuple[str, int], list[int]], dim: int, seed: int = 0) -> None:
        super().__init__(outputs, seed)
        self.guests = 3 * torch.randn(5, dim, generator=torch.Generator().manual_seed(seed))
        self.heard = self.rows = 0

    def _tree(self, ask: Ask) -> DraftTree:
        tree, rng = super()._tree(ask), self.rng
        for node in range(-1, len(tree)):
            if rng.random() < 0.6:
                tree.guests[node] = tuple(
                    tuple(rng.sample(range(5), rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
                )
        return tree

    def answer(self, seq, tree, node, guesses):
        assert len(guesses) == tree.num_guests(node) and all(0 <= row[0][1] <= 1 for row in guesses)
        self.heard += 1
        self.rows += len(guesses)


def driver(drafter: str = "", **options) -> Driver:
    return Driver(**({"model": NANO, "max_model_len": 112, "drafter": drafter, "draft_control": "fixed"} | options))


def install(d: Driver, drafter: Drafter) -> None:
    """Use this drafter in place of ``replay``, with which the engine was started."""
    d.engine.proposals.drafting.drafter = drafter
    d.engine.proposals.drafting.listen()
    place = d.engine.runner.model.place
    d.engine.runner.parts.guest_inputs = (
        None if drafter.guests is None else drafter.guests.to(place.device, place.dtype)
    )


def requests(d: Driver, temperature: float, n: int = 1, tag: str = "r", **params) -> list:
    """Return prompts with shared beginnings. Every other request is confined to four tokens, so that its text repeats
    itself."""
    shared = [300 + (7 * i) % 1200 for i in range(100)]
    found = []
    for k, length in enumerate(LENGTHS):
        few = {"allowed_token_ids": FEW} if k % 2 else {}
        given = (
            dict(temperature=temperature, max_tokens=OUTPUT, ignore_eos=True, seed=100 + k, n=n, logprobs=0)
            | few
            | params
        )
        found.append(d.request(f"{tag}{k}", [*shared[: length - 2], 300 + k, 301 + 2 * k], **given))
    return found


def outputs(d: Driver) -> dict:
    """Everything that a reader gets: tokens and log-probabilities, to the bit."""
    assert not d.errors
    return {key: (out.tokens, [(p.id, p.logprob, p.rank) for p in out.logprobs]) for key, out in d.outputs.items()}


def plain(temperature: float, n: int = 1, codec: str = "plain", **params) -> dict:
    """Return a plain engine: one request at a time, in one chunk, without cache or drafter."""
    d = driver(max_num_batched_tokens=512, max_num_seqs=32, enable_prefix_caching=False, kv_codec=codec)
    for request in requests(d, temperature, n, **params):
        d.run([request])
    d.close()
    return outputs(d)
