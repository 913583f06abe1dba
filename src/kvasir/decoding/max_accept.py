"""Block verification of drawn drafts (Sun et al., arXiv 2403.10444, algorithm 2). It keeps the model's distribution,
not its tokens.

Drafts X_1 .. X_g were each drawn from the drafter's q_i given those before it; p_i is the model's distribution at the
same row. With P_0 = 1 and

    P_i = min(1, P_(i-1) p_i(X_i) / q_i(X_i))        h_g = P_g
    S_i = sum_x max(P_i p_(i+1)(x) - q_(i+1)(x), 0)   h_i = S_i / (S_i + 1 - P_i)

the largest i with u_i < h_i is accepted. The next token is drawn from max(P_i p_(i+1) - q_(i+1), 0), or from p_(g+1)
after the last draft. This accepts more drafts than any rule that looks at one draft at a time. The price: tokens depend
on what was proposed, so a seed no longer fixes them. Whether a draft is verified may depend on what was known before it
was drawn, but never on its value, which would bend the distribution. So drafts come with estimates that do not depend
on them.

Drafts, coins and the final draw have noise of their own, keyed by (stream, position of the last known token, use). A
position that is drafted for a second time, after its first draft was rejected, must not meet the same noise again.

Legend: B blocks, G the most drafts of a block, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.decoding.rows import SampleBatch
from kvasir.kernels.noise import gumbel
from kvasir.kernels.sample import GREEDY_BELOW
from kvasir.types import Guess, Sequence, Span

# Key in ``Sequence.state``: position of the last known token, and what its drafts are verified by: the log-weights that
# each was drawn from, as [G, V], a `Spread` or a `DrawnTree`; or `Typical`.
DRAWN = "drawn_from"


def fresh_stream(seq: Sequence, position: int, use: bytes) -> int:
    """Return a noise stream for one ``use`` at one position, for everything drawn before the model has answered."""
    digest = hashlib.blake2b(
        seq.stream.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8, person=b"kvasir-" + use
    )
    return int.from_bytes(digest.digest(), "little")


def coins(seq: Sequence, position: int, count: int) -> np.ndarray:
    """Return ``count`` independent uniform numbers in [0, 1), float64."""
    words = b"".join(
        hashlib.blake2b(
            seq.stream.to_bytes(8, "little") + position.to_bytes(8, "little") + part.to_bytes(2, "little"),
            person=b"kvasir-coins",
        ).digest()
        for part in range(-(-count // 16))
    )
    return np.frombuffer(words, np.uint32)[:count] / 2.0**32


@dataclass(frozen=True, slots=True)
class Spread:
    """Distributions over few tokens each: what drafts were drawn from that know only the likeliest tokens.

    ``ids`` int64 and ``log_weights`` fp32 [G, tokens] on the host. A place without a token has weight -inf."""

    ids: torch.Tensor
    log_weights: torch.Tensor

    @staticmethod
    def of(guesses: Many[Many[Guess]]) -> Spread:
        """The spread of tokens and their chances, by draft; the chances need not sum to 1."""
        width = max(map(len, guesses))
        ids, chances = np.zeros((len(guesses), width), np.int64), np.zeros((len(guesses), width))
        for row, pairs in enumerate(guesses):
            ids[row, : len(pairs)], chances[row, : len(pairs)] = zip(*pairs)
        with np.errstate(divide="ignore"):
            return Spread(torch.from_numpy(ids), torch.from_numpy(np.log(chances).astype(np.float32)))

    def dense(self, count: int, size: int, device: torch.device) -> torch.Tensor:
        """Log-weights [count, size] of the first ``count`` drafts."""
        found = torch.full((count, size), -torch.inf, device=device)
        # A place without a token repeats id 0: the larger weight stays.
        return found.scatter_reduce_(
            1, self.ids[:count].to(device), self.log_weights[:count].to(device), "amax", include_self=True
        )


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """A tree of drawn nodes, siblings in the order of their draws (`kvasir.decoding.multi_round`).

    ``weights``: log-weights [.., V] that the children of the anchor and of each expanded node were drawn from."""

    tokens: list[int]
    parents: list[int]
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Typical:
    """Asks for typical acceptance with this ``eps`` (`kvasir.decoding.typical`), whatever the drafts were made of."""

    eps: float


@dataclass(slots=True)
class Block:
    """The drafts of one span. ``first``: logit row that the first draft follows; ``weights``: log-weights of q
    [len(drafts), V], or of its few tokens. For trees ``parents`` holds each draft's parent among the rows from the
    first on; None: a chain."""

    seq: Sequence
    first: int
    position: int
    drafts: list[int]
    weights: torch.Tensor | Spread | DrawnTree | Typical
    parents: list[int] | None = None

    def log_weights(self, size: int, device: torch.device) -> torch.Tensor:
        """Log-weights [len(drafts), V = ``size``] on the device."""
        count = len(self.drafts)
        return self.weights.dense(count, size, device) if isinstance(self.weights, Spread) else self.weights[:count]


def drawn(span: Span) -> torch.Tensor | Spread | DrawnTree | Typical | None:
    """Return the log-weights that this span's drafts were drawn from; None when the walk verifies them."""
    at, weights = span.seq.state.get(DRAWN, (-1, None))
    sample = span.want.get("sample", range(0))
    fits = len(sample) > 1 and at == span.start + sample.start
    if span.parents is not None and not isinstance(weights, DrawnTree | Typical):
        return None
    return weights if fits and span.seq.request.params.temperature >= GREEDY_BELOW else None


def blocks(batch: SampleBatch) -> list[Block]:
    """Return the blocks of a step."""
    found = []
    for span, wanted, first, row_tokens in zip(batch.spans, batch.wanted, batch.first, batch.row_tokens):
        if row_tokens and (weights := drawn(span)) is not None:
            sample = span.want["sample"]
            found.append(
                Block(
                    span.seq,
                    first + wanted.index(sample.start),
                    span.start + sample.start,
                    row_tokens[sample.start + 1 :],
                    weights,
                    span.parents and [parent - sample.start for parent in span.parents[sample.start + 1 :]],
                )
            )
    return found


def verify(
    p_BHV: torch.Tensor, q_BGV: torch.Tensor, drafts_BG: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule of the module docstring.

    ``p`` [B, G + 1, V] and ``q`` [B, G, V] are probabilities; rows after ``lengths`` are ignored. Returns h [B, G], and
    the weights [B, G + 1, V] of the token that follows 0, 1, .. accepted drafts."""
    count = q_BGV.shape[1]
    at = drafts_BG[..., None]
    ratio_BG = (p_BHV[:, :-1].gather(2, at) / q_BGV.gather(2, at))[..., 0]
    reach = [torch.ones_like(ratio_BG[:, 0])]
    for i in range(count):  # an impossible draft ends the block, whatever the rows after it hold
        reach.append(torch.where(ratio_BG[:, i] > 0, reach[-1] * ratio_BG[:, i], 0.0).clamp(max=1.0))
    reach_BH = torch.stack(reach, 1)
    rest_BGV = (reach_BH[:, :-1, None] * p_BHV[:, :-1] - q_BGV).clamp(min=0.0).nan_to_num(0.0)
    sum_BG = rest_BGV.sum(-1)
    step = torch.arange(count, device=ratio_BG.device)
    # Where P is 1, h is 1, even if no weight is left over; where P is 0, h is 0.
    gap_BG = 1.0 - reach_BH[:, :-1]
    h_BG = torch.where(gap_BG > 0, sum_BG / (sum_BG + gap_BG).clamp(min=1e-38), 1.0)
    h_BG = torch.cat([h_BG[:, 1:], torch.zeros_like(h_BG[:, :1])], 1)
    h_BG = torch.where(step + 1 == lengths_B[:, None], reach_BH[:, 1:], h_BG)
    whole_BG = (step >= lengths_B[:, None]) | (sum_BG <= 0)  # no draft there; or p = q up to rounding
    weights_BHV = torch.cat([torch.where(whole_BG[..., None], p_BHV[:, :-1], rest_BGV), p_BHV[:, -1:]], 1)
    return h_BG * (step < lengths_B[:, None]), weights_BHV


def accept(found: list[Block], rows: np.ndarray, final_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
    """Replace the draws of the blocks by what they emit: the accepted drafts and the token after them. The walk then
    stops there.

    ``rows``: for each block, the index of its first row in ``final_SV`` (processed log-weights) and ``tokens_S``; its
    other rows follow."""
    device, lengths = final_SV.device, np.array([len(b.drafts) for b in found])
    count = int(lengths.max())
    order_BH = np.minimum(np.arange(count + 1), lengths[:, None])  # rows of each block, padded with the last one

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    at_BH, padded_BH = send(np.asarray(rows)[:, None] + order_BH), send(order_BH)
    drafts_BG = send(np.array([b.drafts + b.drafts[-1:] * (count - len(b.drafts)) for b in found]))
    u_BG = send(np.stack([np.pad(coins(b.seq, b.position, len(b.drafts)), (0, count - len(b.drafts))) for b in found]))
    place_BG = send(np.cumsum([0, *lengths[:-1]])[:, None] + order_BH[:, 1:] - 1)
    q_BGV = torch.cat([b.log_weights(final_SV.shape[1], device) for b in found]).softmax(-1)[place_BG]
    h_BG, weights_BHV = verify(final_SV[at_BH].softmax(-1), q_BGV, drafts_BG, send(lengths))
    step = torch.arange(count + 1, device=device)
    tau_B1 = ((u_BG < h_BG) * step[1:]).amax(1, keepdim=True)
    streams_B = send(np.array([fresh_stream(b.seq, b.position, b"rest") for b in found], np.uint64).view(np.int64))
    noise_BV = gumbel(streams_B, send(np.array([b.position for b in found])), final_SV.shape[1])
    last_B1 = (weights_BHV.take_along_dim(tau_B1[..., None], 1)[:, 0].log() + noise_BV).argmax(-1, keepdim=True)
    emitted_BH = torch.where(
        step < tau_B1,
        torch.cat([drafts_BG, drafts_BG[:, -1:]], 1),
        torch.where(step == tau_B1, last_B1, tokens_S[at_BH]),
    )
    tokens_S[at_BH] = emitted_BH.gather(1, padded_BH)  # padding writes the same token again
