"""Try the kernels of training on this GPU, on small inputs, before a run relies on them: fused attention for packed
rows, and the chunks of recurrent layers."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from kvasir.errors import install
from kvasir_lab.delta import scan
from kvasir_lab.delta_chunks import delta_rule, kernels
from kvasir_lab.model import Shape, block_mask, document_mask

TOLERANCE = 0.03  # Largest accepted error, relative to the largest value; bf16 rounds to 1 in 256.
RECURRENT = ("output", *(f"{name} gradient" for name in ("query", "key", "value", "decay", "beta")))


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
        return _in_a_line(e)
    return _difference(("output", "query gradient", "key gradient", "value gradient"), got, wanted)


def why_no_chunks(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why recurrent layers cannot train by `delta_chunks.delta_rule` in ``dtype``, in one line; None when they can.

    Its results and gradients must equal those of `delta.scan` in fp32, for packed documents and for whole rows. The
    first call compiles and tunes the kernels for this shape.
    """
    try:
        kernels()
    except Exception as e:  # noqa: BLE001 (a package that is there but broken can raise anything)
        missing = isinstance(e, ModuleNotFoundError) and e.name == "fla"
        return f"fla-core is not installed ({install('fla')})" if missing else _in_a_line(e)
    generator = torch.Generator(device).manual_seed(0)
    # The kernels are tuned for the first input that they meet, so it is of the size of training on a GPU.
    rows, length, heads = 64 if device.startswith("cuda") else 2, 300, shape.value_heads

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(rows, length, *sizes, device=device, generator=generator)

    q, k = (F.normalize(random(shape.key_heads, shape.state_dim), dim=-1) for _ in range(2))
    v, weight = (random(heads, shape.state_dim) for _ in range(2))
    given = [x.to(dtype) for x in (q * shape.state_dim**-0.5, k, v)]
    given += [-0.1 * random(heads).exp(), random(heads).sigmoid()]
    state = v.new_zeros(rows, heads, shape.state_dim, shape.state_dim)
    packed = (torch.arange(rows * length, device=device).view(rows, length) // 77).to(torch.int16)
    for documents in (packed, None):
        exact = [x.detach().float().requires_grad_() for x in given]
        repeated = (x.repeat_interleave(heads // shape.key_heads, 2) for x in exact[:2])
        numbers = torch.zeros_like(packed) if documents is None else documents
        out = scan(*repeated, *exact[2:], numbers, state)[0]
        wanted = [out, *torch.autograd.grad((out * weight).sum(), exact)]
        inputs = [x.detach().requires_grad_() for x in given]
        try:
            out = delta_rule(*inputs, documents)
            got = [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]
            reason = _difference(RECURRENT, got, wanted)  # waits for the device
        except Exception as e:  # noqa: BLE001 (as above)
            return _in_a_line(e)
        if reason is not None:
            return reason
    return None


def _in_a_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"


def _difference(names: tuple[str, ...], got: list[torch.Tensor], wanted: list[torch.Tensor]) -> str | None:
    """The first of ``got`` that is not that of ``wanted``, in words; None when all are."""
    for name, a, b in zip(names, got, wanted, strict=True):
        a, b = a.detach().float(), b.detach().float()
        error = float((a - b).abs().max() / b.abs().max())
        if not error < TOLERANCE:
            return f"its {name} is off by {error:.1%}"
    return None
