"""Gated DeltaNet for training, with the parameter names of Qwen 3.5 (Yang et al. 2024, arXiv:2412.06464).

``scan`` computes the rule of `kvasir.kernels.gated_delta.recurrence` for whole packed rows. All chunks are prepared at
once. What is left to do in order is one product a chunk, because the state after a chunk is linear in the state before
it: S <- M S + N. States do not cross documents. In training on a GPU `kvasir_lab.delta_chunks` may take its place.

Shape suffixes: B rows, T tokens, H heads of values, D key dim, V value dim, C mixed row (queries, keys, values), J
taps, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from kvasir_lab.delta_chunks import delta_rule

CHUNK = 64  # Tokens of a chunk.
AT_ONCE = 1 << 17  # Tokens that are mixed at once where no gradient is wanted: a token takes some 25 kB of memory.
L2_EPS = 1e-6  # Of the norms of queries and keys, as in Qwen 3.5.
# The start of decays, as in the paper's code: rates from 1 to 16, and steps from 1e-3 to 0.1 on a logarithmic scale.
RATES, STEPS = (1.0, 16.0), (1e-3, 0.1)


def convolve(x_BTC: torch.Tensor, tail: torch.Tensor, weight_CJ: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """silu of the causal convolution, in fp32. ``tail`` [B, J - 1, C]: the rows before. ``documents`` [B, J - 1 + T]: a
    token sees tokens of its own document only."""
    length, taps = x_BTC.shape[1], weight_CJ.shape[1]
    padded, mine, total = torch.cat((tail, x_BTC), 1), documents[:, taps - 1 :], 0.0
    for tap in range(taps):
        same = (documents[:, tap : tap + length] == mine).unsqueeze(-1)
        total = total + torch.where(same, padded[:, tap : tap + length], 0.0) * weight_CJ[:, tap]
    return F.silu(total)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [B, T, H, V] and the state [B, H, D, V] after the last token, in fp32.

    q, k [B, T, H, D]; v [B, T, H, V]; decay (its logarithm), beta [B, T, H]; documents [B, T], ``state`` belongs to the
    first one.
    """
    rows, length, heads, value_dim = v.shape
    pad = -length % CHUNK
    if pad:  # padding writes nothing, forgets nothing, and belongs to the last document
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        decay, beta = (F.pad(x, (0, 0, 0, pad)) for x in (decay, beta))
        documents = torch.cat((documents, documents[:, -1:].expand(-1, pad)), 1)
    count = (length + pad) // CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, ...] -> [B, N, H, L, ...]"""
        return x.unflatten(1, (count, CHUNK)).transpose(2, 3)

    q, k, v, decay, beta = (chunks(x) for x in (q, k, v, decay, beta))
    number = documents.unflatten(1, (count, CHUNK))  # [B, N, L]
    before = torch.cat((documents[:, :1], number[:, :-1, -1]), 1)[..., None]  # of the token before each chunk
    from_state = (number == before)[:, :, None, :, None]
    to_state = (number == number[..., -1:])[:, :, None, :, None]
    passes = (before == number[..., -1:])[:, :, None, :, None]  # the chunk is one document with what came before it
    total = decay.cumsum(-1)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    seen = seen & (number[..., :, None] == number[..., None, :])[:, :, None]
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    keys, grown = k * beta[..., None], torch.where(from_state, total.exp()[..., None], 0.0)
    system = (keys @ k.mT) * between
    both = torch.cat((v * beta[..., None], keys * grown), -1)
    # Not by powers of the system, though they are products: where keys are alike, powers are huge and cancel in fp32.
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    written, reads = solved.split((value_dim, k.shape[-1]), -1)  # what a chunk writes is written - reads @ state
    last = total[..., -1:]
    kept = torch.where(to_state, (last - total).exp()[..., None], 0.0) * k
    through = torch.where(passes, last.exp()[..., None], 0.0)  # [B, N, H, 1, 1]
    eye = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    # Chunks first, so that the loop copies nothing: [N, B * H, D, D] and [N, B * H, D, V].
    step, added = (x.transpose(0, 1).flatten(1, 2) for x in (through * eye - kept.mT @ reads, kept.mT @ written))
    states, now = [], state.flatten(0, 1)
    for n in range(count):
        states.append(now)
        now = torch.baddbmm(added[n], step[n], now)
    begun = torch.stack(states).unflatten(1, (rows, heads)).transpose(0, 1)  # [B, N, H, D, V]
    attention = (q @ k.mT) * between
    out = attention @ written + (q * grown - attention @ reads) @ begun
    return out.transpose(2, 3).flatten(1, 2)[:, :length], now.unflatten(0, (rows, heads))


def scan_some(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``scan``, a few rows after the other where no gradient is wanted and memory would not do for all."""
    rows, length = inputs[0].shape[:2]
    most = rows if torch.is_grad_enabled() else max(1, AT_ONCE // length)
    if most >= rows:
        return scan(*inputs)
    parts = [scan(*part) for part in zip(*(x.split(most) for x in inputs))]
    return torch.cat([out for out, _ in parts]), torch.cat([state for _, state in parts])


class Sizes(Protocol):
    """The fields of a model's shape that a recurrent layer needs."""

    dim: int
    key_heads: int
    value_heads: int
    state_dim: int
    taps: int
    norm_eps: float


class GatedNorm(nn.Module):
    """RMS norm of every head's result, times silu of its gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.float() * normed * F.silu(gate.float())


class DeltaNet(nn.Module):
    """The mixer of a recurrent layer. Its cache is the state [B, H, D, V] fp32 and the last J - 1 mixed rows."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.shape = s
        # The dtype in which rows without a cache run through `delta_chunks`; None: they do not. `fused` tries that.
        self.chunked: torch.dtype | None = None
        self.keys, self.values = s.key_heads * s.state_dim, s.value_heads * s.state_dim
        self.in_proj_qkv = nn.Linear(s.dim, 2 * self.keys + self.values, bias=False)
        self.in_proj_z = nn.Linear(s.dim, self.values, bias=False)
        self.in_proj_b = nn.Linear(s.dim, s.value_heads, bias=False)
        self.in_proj_a = nn.Linear(s.dim, s.value_heads, bias=False)
        mixed = 2 * self.keys + self.values
        self.conv1d = nn.Conv1d(mixed, mixed, s.taps, groups=mixed, bias=False)  # holds the weight; see `convolve`
        self.A_log = nn.Parameter(torch.zeros(s.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(s.value_heads))
        self.norm = GatedNorm(s.state_dim, s.norm_eps)
        self.out_proj = nn.Linear(self.values, s.dim, bias=False)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the parameters that are no matrices."""
        with torch.no_grad():
            self.conv1d.weight.uniform_(-1, 1, generator=generator).mul_(self.shape.taps**-0.5)
            self.A_log.uniform_(*RATES, generator=generator).log_()
            low, high = (torch.tensor(edge).log().item() for edge in STEPS)
            step = torch.empty_like(self.dt_bias).uniform_(low, high, generator=generator).exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives ``step`` again

    def forward(
        self,
        x: torch.Tensor,
        documents: torch.Tensor | None,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Mix x [B, T, E]. ``documents`` [B, T]: the document of every token; None: one a row, that of the cache.
        ``cache`` is read and written in place."""
        s, (rows, length, _) = self.shape, x.shape
        mixed, gate = self.in_proj_qkv(x), self.in_proj_z(x)
        b, a = self.in_proj_b(x), self.in_proj_a(x)
        with torch.autocast(x.device.type, enabled=False):
            given = documents
            if documents is None:
                documents = torch.zeros(rows, length, dtype=torch.int16, device=x.device)
            if cache is None:
                state = x.new_zeros(rows, s.value_heads, s.state_dim, s.state_dim, dtype=torch.float32)
                tail = mixed.new_zeros(rows, s.taps - 1, mixed.shape[-1])
            else:
                state, tail = cache
            around = torch.cat((documents[:, :1].expand(-1, s.taps - 1), documents), 1)
            q, k, v = self._inputs(convolve(mixed.float(), tail.float(), self.conv1d.weight[:, 0].float(), around))
            decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
            beta = b.float().sigmoid()
            if cache is None and mixed.dtype == self.chunked:
                out = delta_rule(*(z.to(mixed.dtype) for z in (q, k, v)), decay, beta, given).float()
            elif length == 1 and cache is not None:
                out, after = self._step(*self._repeated(q, k), v, decay, beta, state)
            else:
                out, after = scan_some(*self._repeated(q, k), v, decay, beta, documents, state)
            if cache is not None:
                last = torch.where((around == documents[:, -1:])[..., None], torch.cat((tail, mixed), 1), 0.0)
                cache[0].copy_(after)
                cache[1].copy_(last[:, length:])
            out = self.norm(out, gate.unflatten(-1, (s.value_heads, s.state_dim))).flatten(2)
        return self.out_proj(out.to(x.dtype))

    def _inputs(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [B, T, heads of keys, D], and values [B, T, H, V]."""
        s = self.shape
        q, k, v = mixed.split((self.keys, self.keys, self.values), -1)
        q, k = (x.unflatten(-1, (s.key_heads, s.state_dim)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        return q * s.state_dim**-0.5, k, v.unflatten(-1, (s.value_heads, s.state_dim))

    def _repeated(self, *found: torch.Tensor) -> list[torch.Tensor]:
        """Queries or keys [B, T, H, D], with a head for every head of values."""
        return [x.repeat_interleave(self.shape.value_heads // self.shape.key_heads, 2) for x in found]

    def _step(self, q, k, v, decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
        """One token: the rule itself."""
        q, k, v = (x[:, 0].unsqueeze(-2) for x in (q, k, v))  # [B, H, 1, D]
        state = state * decay[:, 0].exp()[..., None, None]
        state = state + k.mT @ ((v - k @ state) * beta[:, 0][..., None, None])
        return (q @ state).transpose(1, 2), state
