"""The fused kernels against their references by the 2 x rule: see ``check.py``. Reference in fp64, and in the kernel's
precision."""

from __future__ import annotations

import torch

from kvasir.kernels import activation, fused_qkv, gated_norm, gemv, hopper_gemv, norm, shared_expert
from kvasir.kernels.activation import ACTIVATIONS
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec

# Of the largest value: where plain torch happens to be exact.
FLOOR = {
    torch.float32: 4e-6,
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}
TRUNCATED = 4  # Triton's interpreter cuts fp32 off to bf16 instead of rounding, up to twice in a kernel


class Draw:
    """Random tensors of a case: the same on every device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype or self.dtype).to(self.device)


def hold(case: object, got: torch.Tensor, plain: torch.Tensor, want: torch.Tensor) -> float:
    """The worst error of ``got`` against fp64 ``want``, relative to the largest value; at most twice that of
    ``plain``."""
    assert got.shape == want.shape and got.dtype == plain.dtype, (case, got.shape, want.shape, got.dtype)
    if not want.numel():
        return 0.0
    size = float(want.abs().max())
    mine, theirs = (float((t.double() - want).abs().max()) / size for t in (got, plain))
    floor = FLOOR[got.dtype] * (TRUNCATED if got.device.type == "cpu" else 1)
    assert mine <= 2 * theirs + floor, (case, got.dtype, mine, theirs)  # NaN fails, too
    return mine


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def check_norm(case: norm.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    # Rows of a wider tensor, as slices of one are.
    x, h = draw(case.rows, case.width + 8, scale=3.0)[:, : case.width], draw(case.rows, case.width + 16)[:, 8:-8]
    weight, after = (draw(case.width, dtype=torch.float32 if case.wide else dtype) for _ in range(2))
    post = (after, 1e-3) if case.post else None
    worst = hold(
        case, norm.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5), norm64(x, weight, 1e-5)
    )
    plain, plain_sum = norm.add_rms_norm_reference(x, h, weight, 1e-5, post)
    want_sum = (norm64(x, *post) if post else x.double()) + h.double()
    got, got_sum = norm.add_rms_norm(x, held := h.clone(), weight, 1e-5, post)
    assert got_sum is held, "the sum takes the stream's place"
    worst = max(worst, hold(case, got_sum, plain_sum, want_sum), hold(case, got, plain, norm64(want_sum, weight, 1e-5)))
    if post:
        worst = max(worst, hold(case, norm.add_normed(x, h.clone(), post), plain_sum, want_sum))
    return worst


def check_activation(case: activation.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    x = draw(case.rows, 2 * case.width + 4, scale=4.0)[:, 2:-2]
    function = ACTIVATIONS[case.activation]
    return hold(
        case,
        activation.gated_triton(x, function),
        activation.gated_reference(x, function),
        activation.gated_reference(x.double(), function),
    )


def check_fused_qkv(case: fused_qkv.Case, dtype: torch.dtype, device: str) -> float:
    """Queries and pages; nothing but the rows' slots is written."""
    draw = Draw(case.rows + case.dim, dtype, device)
    total, pages = case.heads + 2 * case.groups, 3 + case.rows
    heads = draw(case.rows, total + 2, case.dim)[:, 1:-1]
    table = RopeTable(RopeSpec(1000.0, case.turned or case.dim), 300, torch.device(device)).table
    positions = torch.randint(0, 300, (case.rows,), generator=draw.generator).to(device)
    weight = draw(case.heads + case.groups, case.dim)
    slots = torch.randperm(pages * case.page_slots, generator=draw.generator)[: case.rows]
    if case.skip:
        slots[:: case.skip] = -1
    shape = (pages, 2, 2, max(1, case.groups), case.page_slots, case.dim)

    def run(function, precision: torch.dtype) -> list[torch.Tensor]:
        ops = fused_qkv.HeadOps(
            case.heads,
            table.to(torch.promote_types(precision, torch.float32)),
            positions,
            (weight.to(precision), 1e-5) if case.norm else None,
        )
        if not case.groups:
            return [function(heads.to(precision), ops)]
        pool = torch.full(shape, 7.0, dtype=precision, device=device)
        return [function(heads.to(precision), ops, pool[:, 1, 0], pool[:, 1, 1], slots.to(device)), pool]

    wanted = run(fused_qkv.fused_qkv_reference, torch.float64)
    found = run(fused_qkv.fused_qkv, dtype), run(fused_qkv.fused_qkv_reference, dtype)
    return max(hold(case, got, plain, want) for got, plain, want in zip(*found, wanted))


def check_gemv(case: gemv.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    num_rows = case.outputs * (1 if case.activation is None else 2)
    x, w = draw(case.rows, case.width + 8)[:, : case.width], draw(num_rows, case.width, scale=case.width**-0.5)
    extra = {
        "norm": (draw(case.width), 1e-5) if case.norm else None,
        "bias_N": draw(num_rows) if case.bias else None,
        "residual_TO": draw(case.rows, case.outputs) if case.residual else None,
    }

    def run(precision: torch.dtype) -> torch.Tensor:
        wide = {
            k: v if v is None else (v[0].to(precision), v[1]) if k == "norm" else v.to(precision)
            for k, v in extra.items()
        }
        return gemv.gemv_reference(x.to(precision), w.to(precision), activation=case.activation, **wide)

    want, plain = run(torch.float64), run(dtype)
    got = gemv.gemv(x, w, case.config, activation=case.activation, **extra)
    assert extra["residual_TO"] is None or got is extra["residual_TO"], "the result takes the residual's place"
    return hold(case, got, plain, want)


def check_hopper_gemv(case: hopper_gemv.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    num_rows = case.outputs * (1 + case.gated)
    x, w = draw(case.rows, case.width + 8)[:, : case.width], draw(num_rows, case.width, scale=case.width**-0.5)
    residual = draw(case.rows, case.outputs) if case.residual else None
    activation = "silu" if case.gated else None

    def run(precision: torch.dtype) -> torch.Tensor:
        return gemv.gemv_reference(
            x.to(precision),
            w.to(precision),
            activation=activation,
            residual_TO=None if residual is None else residual.to(precision),
        )

    want, plain = run(torch.float64), run(dtype)
    got = hopper_gemv.stream_rows(x, w, case.ring, gated=case.gated, residual_TO=residual)
    assert residual is None or got is residual, "the result takes the residual's place"
    return hold(case, got, plain, want)


def check_shared_expert(case: shared_expert.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.width, dtype, device)
    x = draw(case.rows, case.width + 8)[:, : case.width]
    gate, shared, residual = draw(case.width, scale=0.2), draw(case.rows, case.width), draw(case.rows, case.width)
    scale = (draw(case.width), 1e-5) if case.norm else None
    old = residual if case.residual else None
    want64 = x.double() if scale is None else norm64(x, *scale)
    want = shared.double() * (want64 @ gate.double()).sigmoid()[:, None] + (0 if old is None else old.double())
    plain = shared_expert.add_shared_reference(x, gate, shared, old, scale)
    kept = residual.clone()
    got = shared_expert.add_shared_triton(x, gate, shared.clone(), old, scale)
    assert torch.equal(residual, kept), "other experts may still read what the residual is"
    return hold(case, got, plain, want)


def check_gated_norm(case: gated_norm.Case, dtype: torch.dtype, device: str) -> float:
    draw = Draw(case.rows + case.heads, dtype, device)
    x = draw(case.rows, case.heads, case.width, scale=2.0, dtype=torch.float32)
    gate = draw(case.rows, case.heads * case.width + 8)[:, 4:-4]
    weight = draw(case.width)
    got = gated_norm.gated_norm_triton(x, gate, weight, 1e-5, case.silu)
    plain = gated_norm.gated_norm_reference(x, gate, weight, 1e-5, case.silu)
    factor = gate.double().sigmoid() * (gate.double() if case.silu else 1.0)
    return hold(case, got, plain, norm64(x, weight, 1e-5).flatten(1) * factor)


CHECKS = {
    "norm": (norm.grid, check_norm),
    "activation": (activation.grid, check_activation),
    "fused_qkv": (fused_qkv.grid, check_fused_qkv),
    "gemv": (gemv.grid, check_gemv),
    "gated_norm": (gated_norm.grid, check_gated_norm),
    "shared_expert": (shared_expert.grid, check_shared_expert),
}
