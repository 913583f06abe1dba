"""One step of the backward of fla-core's chunks in plain products, for GPUs where the package refuses its own kernel.

The package (`kvasir_lab.delta_chunks` names it) offers a registry of replacements for its parts. What the part called
``chunk_bwd_dqkwg`` computes follows from a chunk's forward, with its state h before, its rows x = u - w h, and
D_ij = exp(g_i - g_j) for j <= i:

    o = scale * (exp(g) * q h + (q k^T * D) x),        h' = exp(g_last) h + (exp(g_last - g) * k)^T x

It gets the gradients of o, x and h' and returns those of q, k, w and g. The package's g are logarithms to base 2.

Shape suffixes: R rows of tokens, N chunks, L tokens of a chunk, G heads of keys, H heads of values, D key dim, V value
dim.
"""

from __future__ import annotations

import importlib

import torch


def chunk_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k [1, R, G, D], w [1, R, H, D] and g [1, R, H] fp32; names of arguments are the package's.

    v, do, dv [1, R, H, V]: x, and gradients of o and x. h, dh [1, N, H, D, V]: the state before each chunk, and the
    gradient of that after it. ``cu_seqlens`` [documents + 1] and ``chunk_indices`` [N, 2]: document and number of each
    chunk.
    """
    count, heads = v.shape[1:3]
    device, dtype = q.device, q.dtype
    document, number = chunk_indices.long().unbind(1)
    first, end = cu_seqlens.long()[document] + number * chunk_size, cu_seqlens.long()[document + 1]
    place_NL = first[:, None] + torch.arange(chunk_size, device=device)
    inside_NL = place_NL < end[:, None]
    # Places after a document's end repeat its last token, so that decays stay finite; their x and do are zero.
    place_NL = place_NL.minimum(end[:, None] - 1)
    of_head = torch.arange(heads, device=device)[None, :, None]
    outside_NHL1 = ~inside_NL[:, None, :, None]

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[1, R, heads, ...] -> [N, H, L, ...]; heads of keys are repeated."""
        return x[0][place_NL[:, None], of_head // (heads // x.shape[2])]

    h, dh = (x[0].to(dtype) for x in (h, dh))
    if state_v_first:
        h, dh = h.mT, dh.mT
    q_NHLD, k_NHLD, g_NHL = chunks(q), chunks(k), chunks(g)
    v_NHLV, do_NHLV = (chunks(x).masked_fill_(outside_NHL1, 0.0) for x in (v, do))
    last_NH1 = g_NHL[..., -1:]
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=device).triu(1)
    between = (g_NHL[..., :, None] - g_NHL[..., None, :]).masked_fill_(later, float("-inf")).exp2_()
    ds_NHLL = ((do_NHLV @ v_NHLV.mT) * between.mul_(scale)).to(dtype)
    del between
    from_state = (do_NHLV @ h.mT) * (g_NHL.exp2() * scale)[..., None].to(dtype)
    dq_NHLD = from_state.add_(ds_NHLL @ k_NHLD)
    to_state = (v_NHLV @ dh.mT) * (last_NH1 - g_NHL).exp2()[..., None].to(dtype)
    moved_NHL = (to_state.float() * k_NHLD).sum(-1)
    dk_NHLD = to_state.add_(ds_NHLL.mT @ q_NHLD)
    dw_NHLD = -(chunks(dv).to(dtype) @ h.mT)
    dg_NHL = (dq_NHLD.float() * q_NHLD).sum(-1) - (dk_NHLD.float() * k_NHLD).sum(-1)
    whole_NH = (h.float() * dh).sum((-2, -1)) * last_NH1[..., 0].exp2() + moved_NHL.sum(-1)
    # The last token of a chunk, to which the places after it are equal.
    final_N1 = inside_NL.sum(-1, keepdim=True) - 1
    dg_NHL = dg_NHL.scatter_add(-1, final_N1[:, None].expand(-1, heads, -1), whole_NH[..., None])

    # Every token is in one chunk: read its results from there.
    back = torch.empty(count + 1, dtype=torch.long, device=device)
    slots = torch.arange(place_NL.numel(), device=device)
    back[place_NL.masked_fill(~inside_NL, count).flatten()] = slots
    chunk, offset = back[:count] // chunk_size, back[:count] % chunk_size

    def tokens(x: torch.Tensor) -> torch.Tensor:
        """[N, H, L, ...] -> [1, R, H, ...]"""
        return x[chunk, :, offset].contiguous()[None]  # the package's kernels count on that

    dq, dk = (tokens(x) for x in (dq_NHLD, dk_NHLD))
    if (groups := q.shape[2]) != heads:
        dq, dk = (x.unflatten(2, (groups, -1)).sum(3) for x in (dq, dk))
    return dq, dk, tokens(dw_NHLD).to(w.dtype), tokens(dg_NHL)


def register_if_needed(*, always: bool = False) -> None:
    """Offer `chunk_products` to the package where it would refuse its own kernel; ``always``: for tests."""
    part = importlib.import_module("fla.ops.common.chunk_o")
    hopper, fault, repaired = (
        getattr(part, name, False) for name in ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    )
    if not always and not (hopper and fault and not repaired):
        return
    backends = importlib.import_module("fla.backends")

    class Products(backends.BaseBackend):
        backend_type = "kvasir"
        chunk_bwd_dqkwg = staticmethod(chunk_products)

        def chunk_bwd_dqkwg_verifier(self, **given):
            needed = ("w", "g", "dv", "cu_seqlens", "chunk_indices")
            return all(given.get(name) is not None for name in needed), "only the delta rule of packed documents"

    backends.register("common")(Products)
