"""Block verification of drafts that were drawn (Sun et al., arXiv 2403.10444, algorithm 2): the model's distribution, not its tokens.

For drafts X_1 .. X_g, each drawn from the drafter's q_i given those before it, and the model's p_i at the same rows, P_0 = 1 and

    P_i = min(1, P_(i-1) p_i(X_i) / q_i(X_i))        h_g = P_g
    S_i = sum_x max(P_i p_(i+1)(x) - q_(i+1)(x), 0)   h_i = S_i / (S_i + 1 - P_i)

the largest i with u_i < h_i is accepted, and the next token drawn from max(P_i p_(i+1) - q_(i+1), 0), behind the last draft from p_(g+1).
More drafts are right than by any rule that looks at one at a time. What it costs: tokens depend on what was proposed, so a seed no longer
fixes them. Whether a draft is verified may depend on what was known before it was drawn, never on its value (that would bend the
distribution); so drafts come with estimates that do not look at them.

Drafts, coins and the rest have noise of their own, keyed by (stream, position of the last known token, use): a position that is drafted
for twice, since its first draft was rejected, must not meet the same noise again.

Legend: B blocks, G the most drafts of a block, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.decoding.rows import SampleBatch
from kvasir.kernels.noise import gumbel
from kvasir.kernels.sample import GREEDY_BELOW
from kvasir.types import Sequence, Span

DRAWN = "drawn_from"  # in ``Sequence.state``: position of the last known token, and log-weights [G, V] that each draft was drawn from


def fresh_stream(seq: Sequence, position: int, use: bytes) -> int:
    """A noise stream for one ``use`` behind one position: all that is drawn before the model has answered."""
    digest = hashlib.blake2b(
        seq.stream.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8, person=b"kvasir-" + use
    )
    return int.from_bytes(digest.digest(), "little")


def coins(seq: Sequence, position: int, count: int) -> np.ndarray:
    """``count`` independent uniforms in [0, 1), float64."""
    words = b"".join(
        hashlib.blake2b(
            seq.stream.to_bytes(8, "little") + position.to_bytes(8, "little") + part.to_bytes(2, "little"),
            person=b"kvasir-coins",
        ).digest()
        for part in range(-(-count // 16))
    )
    return np.frombuffer(words, np.uint32)[:count] / 2.0**32


@dataclass(slots=True)
class Block:
    """``first``: the logit row behind which the first of ``drafts`` stands. ``weights`` [len(drafts), V]: log-weights of q."""

    seq: Sequence
    first: int
    position: int
    drafts: list[int]
    weights: torch.Tensor


def drawn(span: Span) -> torch.Tensor | None:
    """What this span's drafts were drawn from; None: they are for the walk."""
    at, weights = span.seq.state.get(DRAWN, (-1, None))
    sample = span.want.get("sample", range(0))
    fits = len(sample) > 1 and span.parents is None and at == span.start + sample.start
    return weights if fits and span.seq.request.params.temperature >= GREEDY_BELOW else None


def blocks(batch: SampleBatch) -> list[Block]:
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
                )
            )
    return found


def verify(
    p_BHV: torch.Tensor, q_BGV: torch.Tensor, drafts_BG: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule. ``p`` [B, G + 1, V] and ``q`` [B, G, V]: probabilities; rows behind ``lengths`` are ignored. Returns h [B, G], and the
    weights [B, G + 1, V] of the token behind 0, 1, .. accepted drafts."""
    count = q_BGV.shape[1]
    at = drafts_BG[..., None]
    ratio_BG = (p_BHV[:, :-1].gather(2, at) / q_BGV.gather(2, at))[..., 0]
    reach = [torch.ones_like(ratio_BG[:, 0])]
    for i in range(count):  # a draft that is impossible ends the block, whatever its row holds behind it
        reach.append(torch.where(ratio_BG[:, i] > 0, reach[-1] * ratio_BG[:, i], 0.0).clamp(max=1.0))
    reach_BH = torch.stack(reach, 1)
    rest_BGV = (reach_BH[:, :-1, None] * p_BHV[:, :-1] - q_BGV).clamp(min=0.0).nan_to_num(0.0)
    sum_BG = rest_BGV.sum(-1)
    step = torch.arange(count, device=ratio_BG.device)
    # Where P is 1, so is h, also where nothing is left over; where P is 0, nothing is.
    gap_BG = 1.0 - reach_BH[:, :-1]
    h_BG = torch.where(gap_BG > 0, sum_BG / (sum_BG + gap_BG).clamp(min=1e-38), 1.0)
    h_BG = torch.cat([h_BG[:, 1:], torch.zeros_like(h_BG[:, :1])], 1)
    h_BG = torch.where(step + 1 == lengths_B[:, None], reach_BH[:, 1:], h_BG)
    whole_BG = (step >= lengths_B[:, None]) | (sum_BG <= 0)  # no draft there; or p = q but for rounding
    weights_BHV = torch.cat([torch.where(whole_BG[..., None], p_BHV[:, :-1], rest_BGV), p_BHV[:, -1:]], 1)
    return h_BG * (step < lengths_B[:, None]), weights_BHV


def accept(found: list[Block], rows: np.ndarray, final_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
    """Put what the blocks emit in place of what was drawn: the accepted drafts, then the token behind them. The walk goes so far.

    ``rows``: the row of ``final_SV`` (processed log-weights) and ``tokens_S`` of every block's first row; the others follow."""
    device, lengths = final_SV.device, np.array([len(b.drafts) for b in found])
    count = int(lengths.max())
    order_BH = np.minimum(np.arange(count + 1), lengths[:, None])  # of each block's rows, padded with the last

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    at_BH, padded_BH = send(np.asarray(rows)[:, None] + order_BH), send(order_BH)
    drafts_BG = send(np.array([b.drafts + b.drafts[-1:] * (count - len(b.drafts)) for b in found]))
    u_BG = send(np.stack([np.pad(coins(b.seq, b.position, len(b.drafts)), (0, count - len(b.drafts))) for b in found]))
    held_BG = send(np.cumsum([0, *lengths[:-1]])[:, None] + order_BH[:, 1:] - 1)
    q_BGV = torch.cat([b.weights[: len(b.drafts)] for b in found]).softmax(-1)[held_BG]
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
    tokens_S[at_BH] = emitted_BH.gather(1, padded_BH)  # a row that is there twice gets one token
