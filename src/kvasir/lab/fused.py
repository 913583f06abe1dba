"""Try the fused attention kernel for packed rows on this GPU, on a small input, before a run relies on it."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from kvasir.lab.model import Shape, block_mask, document_mask

TOLERANCE = 0.03  # Largest accepted error, relative to the largest value; bf16 rounds to 1 in 256.


def why_not(shape: Shape, device: str) -> str | None:
    """Why the fused kernel cannot be used, in one line; None when it can.

    The compiled kernel's output and gradients must equal those of a dense mask in fp32.
    """
    generator = torch.Generator(device).manual_seed(0)
    length, grouped = 512, shape.heads != shape.kv_heads

    def random(heads: int) -> torch.Tensor:
        return torch.randn(
            2, heads, length, shape.head_dim, device=device, dtype=torch.bfloat16, generator=generator
        ).requires_grad_()

    inputs = [random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)]
    numbers = (torch.arange(length, device=device) // 75).to(torch.int16).expand(2, -1).contiguous()
    weight = random(shape.heads).detach()

    def results(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad((out.float() * weight.float()).sum(), inputs)]

    exact = [x.detach().float().requires_grad_() for x in inputs]
    q, k, v = exact
    repeats = shape.heads // shape.kv_heads
    wanted = results(
        F.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), document_mask(numbers)
        ),
        exact,
    )
    q, k, v = inputs
    try:
        got = results(
            torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=block_mask(numbers), enable_gqa=grouped),
            inputs,
        )
        torch.accelerator.synchronize()
    except Exception as e:  # noqa: BLE001 (a compiler can raise anything; the caller prints the reason)
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
    for name, a, b in zip(("output", "query gradient", "key gradient", "value gradient"), got, wanted, strict=True):
        error = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        if not error < TOLERANCE:
            return f"its {name} is off by {error:.1%}"
    return None
