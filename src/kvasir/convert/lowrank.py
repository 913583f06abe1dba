"""Low-rank factors of keys and values, and ranks by layer: the mathematics of TransMLA (arXiv 2502.07864) and CARE
(arXiv 2603.17946), in fp64 and without a model.

CARE takes the SVD of C^(1/2) W, with C the second moment of the input. Its right singular vectors are the top
eigenvectors of W^T C W, the Gram of the outputs, and its product is W V V^T: one ``eigh`` of a small matrix, with no
root and no inverse.

Legend: G KV heads, D head dim, N = G D, Q rotary width, M = 2 N - Q outputs that share the rank R. Row vectors:
y = x W.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Allocation = Literal["uniform", "care_paper", "care_code", "relative"]
# Share of the largest eigenvalue that a metric's smaller ones are raised to, because they are inverted.
DAMPING = 1e-6


@dataclass(frozen=True)
class Mixing:
    """An orthogonal mixture of keys, [N, N] in two parts. ``rope``: columns that stay rotary, real halves before
    imaginary ones, [N, Q]; ``rest``: columns that are not rotated any more, [N, N - Q]."""

    rope: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """One layer's latent. ``down`` [2 N, R] makes it of keys and values; a head of group g reads its key by
    ``key`` [G, D, R] and its value by ``value`` [G, D, R]; ``energy``: share of the Gram's trace that is kept."""

    down: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    energy: float


@dataclass(frozen=True)
class Side:
    """The latent of one side, keys or values: ``down`` [N, R] makes it, ``up`` [N, R] reads it (y' = y down up^T);
    ``energy``: share of the Gram's trace that is kept."""

    down: torch.Tensor
    up: torch.Tensor
    energy: float


def mixing(gram: torch.Tensor, kv_heads: int, head_dim: int, rope_dim: int, fold: int) -> Mixing:
    """The mixture that leaves most rotary energy in ``rope_dim`` columns (RoRoPE and FreqFold).

    ``gram`` [N, N]: of keys before RoPE, whose pairs are (j, j + D / 2). ``fold``: number of neighbouring frequencies
    treated as one. In every block of them the ``fold`` rope_dim / D strongest components stay rotary.
    """
    pairs, kept = head_dim // 2, fold * rope_dim // head_dim
    assert kept and fold * rope_dim % head_dim == 0 and pairs % fold == 0, "blocks hold whole components"
    size = kv_heads * head_dim
    real, imag, rest = [], [], []
    for block in range(pairs // fold):
        at = [h * head_dim + block * fold + j for h in range(kv_heads) for j in range(fold)]
        first = torch.tensor(at, device=gram.device)
        second = first + pairs
        both = gram[first][:, first] + gram[second][:, second]  # real and imaginary parts are samples alike
        vectors = torch.linalg.eigh(both).eigenvectors.flip(1)
        for column, rows, out in ((slice(0, kept), first, real), (slice(0, kept), second, imag)):
            out.append(_placed(vectors[:, column], rows, size))
        rest += [_placed(vectors[:, kept:], rows, size) for rows in (first, second)]
    return Mixing(torch.cat([*real, *imag], 1), torch.cat(rest, 1))


def _placed(columns: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    out = columns.new_zeros(size, columns.shape[1])
    out[rows] = columns
    return out


def factor(
    gram: torch.Tensor,
    kv_heads: int,
    rest: torch.Tensor,
    rank: int,
    balance: float = 1.0,
    weight_k: torch.Tensor | None = None,
    weight_v: torch.Tensor | None = None,
) -> Factors:
    """The best latent of ``rank`` for keys and values with the Gram ``gram`` [2 N, 2 N].

    Keys are divided by how much larger they are than ``balance`` times the values, so that they do not take the whole
    rank. ``weight_k`` [N, N], ``weight_v`` [N, N]: second moments of what reads keys and values; None: all errors count
    alike.
    """
    size = gram.shape[0] // 2
    root_k, back_k = _roots(None if weight_k is None else rest.T @ weight_k @ rest, rest.shape[1], gram)
    root_v, back_v = _roots(weight_v, size, gram)
    to_k, to_v = rest @ root_k, root_v  # from keys and values to what is approximated
    own = to_k.T @ gram[:size, :size] @ to_k
    sizes = own.diagonal().clamp_min(0).sqrt().mean(), (to_v.T @ gram[size:, size:] @ to_v).diagonal().clamp_min(0)
    rho = float(sizes[0] / (balance * sizes[1].sqrt().mean()).clamp_min(1e-30)) or 1.0
    maps = torch.block_diag(to_k / rho, to_v)  # [2 N, M]
    found = torch.linalg.eigh(_symmetric(maps.T @ gram @ maps))
    values, vectors = found.eigenvalues.flip(0).clamp_min(0), found.eigenvectors.flip(1)[:, :rank]
    top_k, top_v = vectors[: rest.shape[1]], vectors[rest.shape[1] :]
    key = (rest @ (rho * back_k @ top_k)).view(kv_heads, -1, rank)
    value = (back_v @ top_v).view(kv_heads, -1, rank)
    return Factors(maps @ vectors, key, value, float(values[:rank].sum() / values.sum().clamp_min(1e-30)))


def side(gram: torch.Tensor, rank: int, weight: torch.Tensor | None = None) -> Side:
    """The best latent of ``rank`` for keys alone, or values alone, with the Gram ``gram`` [N, N]. ``weight`` [N, N]:
    second moment of what reads them; None: all errors count alike."""
    root, back = _roots(weight, len(gram), gram)
    found = torch.linalg.eigh(_symmetric(root @ gram @ root))
    values, vectors = found.eigenvalues.flip(0).clamp_min(0), found.eigenvectors.flip(1)[:, :rank]
    energy = float(values[:rank].sum() / values.sum().clamp_min(1e-30))
    return Side(root @ vectors, back @ vectors, energy)


def readers(q_HDD: torch.Tensor, o_EN: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Second moments of what reads keys (queries, by head [H, D, D]) and values (columns of o [E, H D]): [N, N] each, a
    block of a group's heads."""
    heads, dim = len(q_HDD), q_HDD.shape[1]
    o_HED = o_EN.view(len(o_EN), heads, dim).transpose(0, 1)
    by_head = q_HDD, o_HED.mT @ o_HED
    both = (torch.block_diag(*m.view(groups, heads // groups, *m.shape[1:]).sum(1)) for m in by_head)
    return next(both), next(both)


def turned(q_HDD: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Second moments of queries [H, D, D], averaged over all angles between query and key: keys before RoPE are read at
    any distance. Pairs are (j, j + rope_dim / 2); what mixes two pairs, or the two of one, averages out."""
    out, pairs = q_HDD.clone(), rope_dim // 2
    size = q_HDD.diagonal(dim1=1, dim2=2)
    mean = (size[:, :pairs] + size[:, pairs:rope_dim]) / 2
    out[:, :rope_dim], out[:, :, :rope_dim] = 0, 0
    for half in (0, pairs):
        out[:, half : half + pairs, half : half + pairs] = torch.diag_embed(mean)
    return out


def spectrum(gram: torch.Tensor, rest: torch.Tensor, balance: float = 1.0) -> list[float]:
    """Squared singular values of the outputs that share the rank, largest first."""
    size = gram.shape[0] // 2
    k = rest.T @ gram[:size, :size] @ rest
    rho = float(k.diagonal().sqrt().mean() / (balance * gram[size:, size:].diagonal().sqrt().mean()).clamp_min(1e-30))
    maps = torch.block_diag(rest / (rho or 1.0), torch.eye(size, dtype=gram.dtype, device=gram.device))
    return torch.linalg.eigvalsh(_symmetric(maps.T @ gram @ maps)).flip(0).clamp_min(0).tolist()


def _roots(moment: torch.Tensor | None, size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The root of a second moment, scaled to a mean eigenvalue of one, and the root's inverse."""
    if moment is None:
        eye = torch.eye(size, dtype=like.dtype, device=like.device)
        return eye, eye
    values, vectors = torch.linalg.eigh(_symmetric(moment) * (size / moment.trace().clamp_min(1e-30)))
    root = values.clamp_min(float(values[-1]) * DAMPING).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _symmetric(x: torch.Tensor) -> torch.Tensor:
    return (x + x.T) / 2


def allocate(
    spectra: Sequence[Sequence[float]],
    rank: int,
    *,
    alloc: Allocation,
    step: int,
    most: int,
    weights: Sequence[float] | None = None,
) -> list[int]:
    """Ranks of all layers, whose sum is at most ``rank`` times their number, in steps of ``step``.

    ``spectra``: squared singular values of each layer, whole and descending. Every layer begins at half of ``rank`` and
    ends at its double or ``most``. ``care_paper`` gives a step to the layer with the largest share of its own tail
    (CARE, section 3.3); ``care_code`` multiplies by the published code's two factors, which favour early layers and
    small ranks; ``relative`` takes the largest share of a layer's total, times ``weights``. The last is a sum of
    concave functions, so that greedy is optimal.
    """
    layers = len(spectra)
    if alloc == "uniform":
        return [rank] * layers
    least = max(step, rank // 2 // step * step)
    most = min(2 * rank, most)

    def gain(layer: int, at: int) -> float:
        values = spectra[layer]
        won, tail = sum(values[at : at + step]), sum(values[at:])
        if alloc == "relative":
            return (1.0 if weights is None else weights[layer]) * won / max(sum(values), 1e-300)
        share = won / max(tail, 1e-300)
        if alloc == "care_code":
            share *= math.sqrt((layers - layer) / ((layers + 1) / 2)) / math.sqrt(at / least)
        return share

    ranks = [least] * layers
    heap = [(-gain(layer, least), layer) for layer in range(layers)]
    heapq.heapify(heap)
    left = rank * layers - sum(ranks)
    while heap and left >= step:
        _, layer = heapq.heappop(heap)
        if ranks[layer] + step > most:
            continue
        ranks[layer] += step
        left -= step
        heapq.heappush(heap, (-gain(layer, ranks[layer]), layer))
    return ranks
