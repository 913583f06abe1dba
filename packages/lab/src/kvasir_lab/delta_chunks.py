"""The rule of `kvasir_lab.delta.scan` by the chunk kernels of flash-linear-attention (fla-core), forward and backward.

`delta_rule` is an operator of its own, so ``torch.compile`` neither looks into it nor breaks its graph there. The
number of documents differs from batch to batch, so their bounds are made inside the operator. The backward runs the
kernels' forward again, which needs nothing of theirs but the public function.

Facts about the package (github.com/fla-org/flash-linear-attention, MIT, read at 0.6.0): ``chunk_gated_delta_rule``
takes q, k [1, R, G, D], v [1, R, H, V], natural logarithms of decays and beta [1, R, H], with ``cu_seqlens`` for
sequences one after the other; heads of values share those of keys in order. It is an autograd function. It keeps
indices of chunks for the object that held the bounds. On Hopper with Triton 3.4.0 to 3.7.0 it refuses one kernel of the
backward, whose numbers are wrong there; `kvasir_lab.delta_products` takes its place.

Shape suffixes: B rows, T tokens, R rows of tokens, G heads of keys, H heads of values, D key dim, V value dim.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from kvasir_lab import delta_products

# The last documents and their bounds: every layer of a step, forward and backward, asks for the same ones.
_last: tuple[tuple[Any, ...], torch.Tensor, torch.Tensor] | None = None


@functools.cache
def kernels() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The package's function. Raises ImportError where it is not installed."""
    found = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    delta_products.register_if_needed()
    return found


def bounds(documents: torch.Tensor) -> torch.Tensor:
    """Places in the flattened rows where the documents [B, T] begin, and the end of the last: int64 [documents + 1].

    A row begins a document. The same tensor gives the same bounds object until it is written to.
    """
    global _last
    key = None
    if not documents.is_inference():  # such a tensor does not say whether it was written to
        key = (documents.data_ptr(), documents.shape, documents.stride(), documents.dtype, documents._version)
        # The tensor is kept too: while it lives, no other one has its address.
        if _last is not None and _last[0] == key:
            return _last[2]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = torch.full((1,), documents.numel(), device=documents.device)
    found = torch.cat((begins.flatten().nonzero().flatten(), end))
    if key is not None:
        _last = (key, documents, found)
    return found


@functools.lru_cache(maxsize=8)
def bounds_of_rows(rows: int, length: int, device: torch.device) -> torch.Tensor:
    """The bounds of documents that are rows: int64 [rows + 1]."""
    return torch.arange(rows + 1, device=device) * length


def _given(inputs, documents) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The kernels' inputs, which are flattened, and the bounds of documents in them."""
    flat = [x.detach().flatten(0, 1).unsqueeze(0) for x in inputs]
    if documents is None:
        return flat, bounds_of_rows(*inputs[0].shape[:2], inputs[0].device)
    return flat, bounds(documents)


@torch.library.custom_op(
    "kvasir_lab::delta_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? documents) -> Tensor",
)
def delta_rule(q, k, v, decay, beta, documents=None):
    """Results [B, T, H, V] in v's dtype, from states of zero.

    q, k [B, T, G, D], normed and q scaled; v [B, T, H, V]; decay (its natural logarithm) and beta [B, T, H] fp32;
    documents [B, T], or None where each row is one.
    """
    inputs, ends = _given((q, k, v, decay, beta), documents)
    with torch.no_grad():
        return kernels()(*inputs, scale=1.0, cu_seqlens=ends)[0].view(v.shape)


@torch.library.custom_op(
    "kvasir_lab::delta_rule_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? documents) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def delta_rule_backward(grad, q, k, v, decay, beta, documents=None):
    """Gradients of q, k, v, decay and beta, in their dtypes."""
    inputs, ends = _given((q, k, v, decay, beta), documents)
    # Plain operations record no gradient inside an operator; the package's autograd function does.
    with torch.enable_grad():
        out = kernels()(*(x.requires_grad_() for x in inputs), scale=1.0, cu_seqlens=ends)[0]
    found = torch.autograd.grad(out, inputs, grad.view(out.shape))
    return tuple(x.contiguous().view(given.shape) for x, given in zip(found, (q, k, v, decay, beta)))


@delta_rule.register_fake
def _(q, k, v, decay, beta, documents=None):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@delta_rule_backward.register_fake
def _(grad, q, k, v, decay, beta, documents=None):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, decay, beta))


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return *delta_rule_backward(grad.contiguous(), *ctx.saved_tensors), None


delta_rule.register_autograd(_backward, setup_context=_keep)
