"""The mixture of experts and the batch-invariant product against their references by the 2 x rule, routing against a
plain sort."""

from __future__ import annotations

import torch

from kvasir.kernels import matmul, moe, moe_rounding, moe_routing
from kvasir.kernels.norm import rms_norm_reference
from tests.kernels.check import FLOOR


def draw_case(case: moe.Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x [T, E], logits [T, X] without ties, gate_up [X, 2F, E], down [X, E, F]."""
    draw = torch.Generator().manual_seed(case.rows)
    x = torch.randn(case.rows, case.dim, generator=draw)
    # Every logit of a row is different in every dtype: which of two equal experts is taken would be anybody's guess.
    order = (
        torch.stack([torch.randperm(case.experts, generator=draw) for _ in range(case.rows)])
        if case.rows
        else torch.zeros(0, case.experts)
    )
    logits = order[:1].expand(case.rows, -1) if case.routing == "same" else order
    gate_up = torch.randn(case.experts, 2 * case.width, case.dim, generator=draw) * case.dim**-0.5
    down = torch.randn(case.experts, case.dim, case.width, generator=draw) * case.width**-0.5
    return tuple(t.to(dtype).to(device) for t in (x, logits.float() / 16, gate_up, down))


def draw_biases(case: moe.Case, dtype: torch.dtype, device: str) -> moe.Biases:
    """Biases of gate and up, large enough that the clamps of an activation count, and of down."""
    draw = torch.Generator().manual_seed(case.rows + 1)
    first = torch.randn(case.experts, 2 * case.width, generator=draw) * 4
    return tuple(t.to(dtype).to(device) for t in (first, torch.randn(case.experts, case.dim, generator=draw)))


def wide(biases: moe.Biases | None) -> moe.Biases | None:
    return None if biases is None else tuple(bias.double() for bias in biases)


def check_routing(logits_TX: torch.Tensor, top_k: int, renormalize: bool, block_m: int) -> None:
    """Weights, ids, the stable order by expert, and tiles that cover it."""
    num_experts = logits_TX.shape[1]
    found = moe_routing.route_triton(logits_TX, top_k, renormalize, block_m)
    weights, ids = moe_routing.route_reference(logits_TX, top_k, renormalize)
    torch.testing.assert_close(found.weights, weights.float(), atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(found.ids.long(), ids)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(found.order.long(), order)
    counts = ids.flatten().bincount(minlength=num_experts).tolist()
    want, at = [], 0
    for expert, count in enumerate(counts):
        want += [[expert, at + first, at + min(first + block_m, count)] for first in range(0, count, block_m)]
        at += count
    num_tiles = int(found.num_tiles)
    assert num_tiles == len(want) <= len(found.tiles)
    assert found.tiles[:num_tiles].tolist() == want


def check_moe(case: moe.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of the kernels and of plain torch, the worse of those without and with a residual; raises AssertionError
    where the kernels are worse than allowed."""
    drawn = draw_case(case, dtype, device)
    biases = draw_biases(case, dtype, device) if case.bias else None
    options = case.top_k, case.renormalize, case.activation
    residual = torch.randn(drawn[0].shape, generator=torch.Generator().manual_seed(1000)).to(dtype).to(device)
    out = moe.moe_triton(*drawn, *options, tiling=case.tiling, biases=biases)
    stream = residual.clone()
    assert moe.moe_triton(*drawn, *options, tiling=case.tiling, residual_TE=stream, biases=biases) is stream
    if case.rows == 1:
        check_row(*drawn, residual, *options, biases)
    want = moe.moe_reference(*(t.double() for t in drawn), *options, biases=wide(biases))
    if not want.numel():
        assert out.shape == want.shape
        return {"kernel": 0.0, "plain": 0.0}
    plain = moe.moe_reference(*drawn, *options, biases=biases)
    worst = {"kernel": 0.0, "plain": 0.0}
    for found, plainly, right in ((out, plain, want), (stream, plain + residual, want + residual.double())):
        errors = {name: float((x.double() - right).abs().max()) for name, x in (("kernel", found), ("plain", plainly))}
        assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype], (case, dtype, errors)  # a NaN fails, too
        worst = {name: max(error, worst[name]) for name, error in errors.items()}
    return worst


def check_row(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    top_k: int,
    renormalize: bool,
    activation: str,
    biases: moe.Biases | None,
) -> None:
    """The single row's kernels, by themselves, after a norm, before a residual add, and between both as in a decoder,
    where x is the residual; with a router that gives these logits up to rounding, twice over: ``arrived`` is zero
    again."""
    arrived = torch.zeros(1, dtype=torch.int32, device=x.device)
    scale = (1 + residual[0].float() / 8).to(x.dtype)  # any numbers but ones
    for norm, joined in ((None, None), ((scale, 0.25), None), (None, residual), ((scale.float(), 0.25), x)):
        normed = x.double() if norm is None else rms_norm_reference(x.double(), norm[0].double(), norm[1])
        router = (logits.T.double() * normed / normed.square().sum()).to(x.dtype)
        shift = None if biases is None else torch.linspace(-0.02, 0.02, len(router), device=x.device).to(x.dtype)
        want = moe.moe_reference(
            normed,
            normed @ router.double().T + (0.0 if shift is None else shift.double()),
            gate_up.double(),
            down.double(),
            top_k,
            renormalize,
            activation,
            wide(biases),
        )
        found = []
        for _ in range(2):
            stream = None if joined is None else joined.clone()
            row = x if joined is not x else stream
            found.append(
                moe.moe_row_triton(
                    row,
                    router,
                    gate_up,
                    down,
                    top_k,
                    renormalize,
                    arrived,
                    activation,
                    norm=norm,
                    residual_1E=stream,
                    biases=biases,
                    router_bias_X=shift,
                )
            )
            assert (stream is None or found[-1] is stream) and int(arrived) == 0
        assert torch.equal(*found)
        addend = torch.zeros_like(want) if joined is None else joined.double()
        room = FLOOR[x.dtype] * (1 + 3 * (want.abs() + addend.abs()))
        assert bool(((found[0].double() - want - addend).abs() <= room).all()), (x.dtype, norm, joined is x)


def check_matmul(case: matmul.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of the batch-invariant product, runs apart and together, and of torch's own."""
    draw = torch.Generator().manual_seed(case.rows)
    x, w, bias = (
        torch.randn(*shape, generator=draw).to(dtype).to(device)
        for shape in ((case.rows, case.inputs), (case.outputs, case.inputs), (case.outputs,))
    )
    bias = bias if case.bias else None
    out, apart, together = (matmul.matmul_invariant(x, w, bias, apart=flag) for flag in (None, True, False))
    assert torch.equal(apart, together) and torch.equal(out, apart), (case, dtype)
    want = matmul.matmul_reference(x.double(), w.double(), None if bias is None else bias.double())
    if not want.numel():
        assert out.shape == want.shape
        return {"kernel": 0.0, "plain": 0.0}
    plain = torch.nn.functional.linear(x, w, bias)
    errors = {name: float((y.double() - want).abs().max()) for name, y in (("kernel", out), ("plain", plain))}
    assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype] * case.inputs**0.5, (case, dtype, errors)
    return errors


def check_row_bits(inputs: int, outputs: int, counts: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """A row alone, at any place of a batch of any size, runs apart or together: the same bits."""
    draw = torch.Generator().manual_seed(inputs)
    x, w, bias = (
        torch.randn(*shape, generator=draw).to(dtype).to(device)
        for shape in ((max(counts), inputs), (outputs, inputs), (outputs,))
    )
    want = matmul.matmul_invariant(x, w, bias)
    for row in sorted({0, 1, max(counts) // 2, max(counts) - 1}):
        assert torch.equal(matmul.matmul_invariant(x[row : row + 1], w, bias), want[row : row + 1]), (
            inputs,
            outputs,
            row,
            dtype,
        )
    for count in counts:
        first = (max(counts) - count) // 2
        for apart in (True, False):
            got = matmul.matmul_invariant(x[first : first + count], w, bias, apart=apart)
            assert torch.equal(got, want[first : first + count]), (inputs, outputs, count, first, apart, dtype)


def check_rounding(case: moe_rounding.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Token rounding: the pairs, weights, rows and tiles that the kernels list; then, for few rows, the experts' sum
    over them and a residual. Raises AssertionError where they differ from the reference by more than the 2 x rule
    allows."""
    shape = moe.Case(rows=case.rows, experts=case.experts, top_k=case.top_k, dim=case.dim, width=case.width)
    x, _, gate_up, down = draw_case(shape, dtype, device)
    draw = torch.Generator().manual_seed(case.rows)
    logits = torch.randn(1 if case.same else case.rows, case.experts, generator=draw).expand(case.rows, -1)
    logits = logits.to(dtype).contiguous().to(device)
    fixed = None
    if case.fixed:
        fixed = (torch.arange(case.rows) % case.fixed == 0).to(torch.uint8).to(device)
    rounding = moe_rounding.Rounding(case.direction, case.tile)
    routing = moe_routing.route_triton(logits, case.top_k, case.renormalize, 16)
    found = moe_rounding.round_triton(logits, routing.weights, routing.ids, case.renormalize, rounding, 16, fixed)
    kept, weights = moe_rounding.round_reference(
        logits.float(), routing.weights, routing.ids, case.renormalize, rounding, fixed
    )
    assert torch.equal(found.at.T >= 0, kept), case
    counts, place = kept.sum(0).tolist(), 0
    rows = kept.T.nonzero()[:, 1].tolist()
    assert found.gather.order[: len(rows)].tolist() == rows and found.stay.order[: len(rows)].tolist() == [
        *range(len(rows))
    ]
    tiles = []
    for expert, count in enumerate(counts):
        tiles += [[expert, place + i, place + min(i + 16, count)] for i in range(0, count, 16)]
        place += count
    assert found.gather.tiles[: int(found.gather.num_tiles)].tolist() == tiles
    assert found.num_found.tolist() == kept.sum(1).tolist()
    for t in range(case.rows):
        experts = kept[t].nonzero().flatten()
        torch.testing.assert_close(found.weights[t, : len(experts)], weights[t, experts], atol=1e-6, rtol=1e-5)
        assert torch.equal(found.found[t, : len(experts)], found.at[experts, t])
    if case.rows > 40:
        return {"kernel": 0.0, "plain": 0.0}
    residual = torch.randn(x.shape, generator=draw).to(dtype).to(device)
    options = dict(rounding=rounding, fixed_T=fixed)
    tile = moe.Tile(16, 32, 32, 4, 2)
    out = moe.moe_triton(
        x, logits, gate_up, down, case.top_k, case.renormalize, residual_TE=residual.clone(),
        tiling=moe.Tiling(tile, tile), **options,
    )  # fmt: skip
    plain, want = (
        moe.rounded_reference(*tensors, case.top_k, case.renormalize, **options)
        for tensors in ((x, logits, gate_up, down), [t.double() for t in (x, logits, gate_up, down)])
    )
    want += residual.double()
    errors = {"kernel": float((out.double() - want).abs().max())}
    errors["plain"] = float(((plain + residual).double() - want).abs().max())
    assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype], (case, dtype, errors)
    return errors
