"""Steps over state pages in Triton's interpreter or on a GPU, compared with the plain recurrence: the results, and all
planes of the pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvasir.kernels import gated_chunks, gated_rows
from kvasir.kernels.gated_delta import CHUNK, Weights, chunk_scan, step
from kvasir.layers.recurrence_backend import RecurrenceBackend
from kvasir.layers.spec import LOOK_AHEAD
from kvasir.technique import load
from tests.kernels import check_delta
from tests.kernels.check_delta import (
    LONG,
    SPECS,
    WIDE,
    World,
    batch_of,
    by_kernel,
    by_reference,
    by_scan,
    compare,
    wide_lengths,
)


def row_by_row(world: World, rows, tables, starts, lengths):
    """Every row of a short step is a span of its own, as in captured steps with drafts, and padding follows."""
    if max(lengths) > LOOK_AHEAD:
        return by_kernel(world, rows, tables, starts, lengths)
    padding = 2
    firsts = [n if not i else 0 for n in lengths for i in range(n)] + [-1] * padding
    own = [start + i for start, n in zip(starts, lengths) for i in range(n)] + [0] * padding
    pages = [pair for pair, n in zip(tables, lengths) for _ in range(n)] + [(0, 0)] * padding
    batch = batch_of(world, own, [1] * len(own), span_lengths=torch.tensor(firsts, device=world.device))
    table = torch.tensor(pages, dtype=torch.int32, device=world.device)
    rows = torch.cat((rows, torch.zeros_like(rows[:padding])))
    out = torch.full((len(rows), *world.pool.layer(0).planes["matrix"].shape[1::2]), 7.0, device=world.device)
    got = step(rows, world.pool.layer(0).planes, table, batch, world.weights, out_THV=out)
    assert got is out and not got[-padding:].any(), "padding has no results"
    return got[:-padding]


@pytest.mark.parametrize("name", SPECS)
def test_steps_against_the_reference(name, device):
    compare(SPECS[name], torch.float32, device)


def test_rows_in_half_precision(device):
    compare(SPECS["even"], torch.float16, device)


def test_states_in_bfloat16(device):
    compare(SPECS["even"], torch.float32, device, near=1e-2, state_dtype="bfloat16")


@pytest.mark.parametrize("name", SPECS)
def test_the_scan_against_the_recurrence(name, device):
    compare(SPECS[name], torch.float32, device, near=1e-4, kernel=by_scan, lengths=LONG)


def strong(world: World, *given, **more) -> torch.Tensor:
    """The scan, or with ``by`` another kernel, with decays whose factors may overflow within 16 rows."""
    kernel = more.pop("by", by_scan)
    usual = world.weights
    world.weights = replace(usual, log_decay_H=usual.log_decay_H + 3)
    try:
        return kernel(world, *given, **more)
    finally:
        world.weights = usual


@pytest.mark.parametrize("exponent", [0.0, gated_chunks.EXPONENT], ids=["by channel", "by factors"])
@pytest.mark.parametrize("name", ["channels", "odd channels", "many channels"])
def test_rows_of_a_block_meet_by_channel_or_by_factors(name, exponent, device, monkeypatch):
    """Many channels are multiplied in parts, of which the last ones have few or none."""
    monkeypatch.setattr(gated_chunks, "EXPONENT", exponent)
    monkeypatch.setattr(gated_chunks, "PART", 16)
    compare(SPECS[name], torch.float32, device, near=1e-4, kernel=by_scan, lengths=LONG)
    worlds = [World(SPECS[name], torch.float32, device, lengths=LONG) for _ in range(2)]
    got, want = worlds[0].run(strong), worlds[1].run(partial(strong, by=by_reference))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_factors_that_overflow_are_seen(device, monkeypatch):
    monkeypatch.setattr(gated_chunks, "EXPONENT", 1e9)
    worlds = [World(SPECS["channels"], torch.float32, device, lengths=LONG) for _ in range(2)]
    got, want = worlds[0].run(strong), worlds[1].run(partial(strong, by=by_reference))
    assert not torch.allclose(got, want, atol=1e-4, rtol=1e-4)


def stand_in(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    """A package's scan of several sequences, as it would be called: by the plain reference."""
    assert scale == 1.0 and output_final_state and initial_state.dtype == torch.float32
    ends, each, found, states = cu_seqlens.tolist(), v.shape[2] // q.shape[2], [], []
    assert not any(end % CHUNK for end in ends) and len(initial_state) == len(ends) - 1
    q, k = (x.repeat_interleave(each, 2) for x in (q, k))
    for begin, end, state in zip(ends, ends[1:], initial_state):
        out, state = chunk_scan(*(x[0, begin:end].float() for x in (q, k, v, g, beta)), state)
        found.append(out), states.append(state)
    return torch.cat(found)[None].to(q.dtype), torch.stack(states)


@pytest.mark.parametrize("name", ["even", "odd channels"])
def test_the_scan_of_a_package_against_the_recurrence(name, device, monkeypatch):
    """Everything beside the package's own kernels: rows, gates, states before and after, spans that begin anywhere."""
    for module, function in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", SimpleNamespace(**{function: stand_in}))
    scan = load("kvasir.layers.recurrences", "fla", RecurrenceBackend).scan
    compare(SPECS[name], torch.float32, device, near=1e-4, kernel=partial(by_scan, scan=scan), lengths=LONG)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["9B", "Kimi Linear"])
def test_the_package_against_the_recurrence(name):
    pytest.importorskip("fla")
    scan = load("kvasir.layers.recurrences", "fla", RecurrenceBackend).scan
    compare(WIDE[name], torch.bfloat16, "cuda", near=2e-2, kernel=partial(by_scan, scan=scan), lengths=wide_lengths())


def test_fp16_goes_row_by_row(device):
    compare(SPECS["even"], torch.float16, device, near=2e-3, kernel=partial(by_scan, scan=None), lengths=LONG)


@pytest.mark.parametrize("name", ["even", "channels"])
def test_a_cut_between_chunks_changes_no_bit_of_the_scan(name, device):
    found = []
    for lengths in ([130, 1], [64, 66, 1], [128, 2, 1]):
        world = World(SPECS[name], torch.float32, device, lengths=[lengths])
        found.append(world.run(by_scan)[:128])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["even", "channels"])
def test_rows_of_a_draft_as_spans_of_their_own(name, device):
    compare(SPECS[name], torch.float32, device, kernel=row_by_row)
    plain = World(SPECS[name], torch.float32, device).run(by_kernel)
    assert torch.equal(World(SPECS[name], torch.float32, device).run(row_by_row, drafts=3), plain)


def test_decays_that_are_as_strong_as_can_be(device):
    """Channels that forget all within a row beside others that keep all: a factor of both directions would overflow."""
    worlds = [World(SPECS["channels"], torch.float32, device, lengths=[[100, 64, 1]]) for _ in range(2)]
    for world in worlds:
        decays = world.rows[0][:, 96:128]
        decays[:, ::2], decays[:, 1::2] = 60.0, -60.0
    got, want = (world.run(run) for world, run in zip(worlds, (by_scan, by_reference)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_equal_keys_are_no_trouble(device):
    """A series of powers of the system would grow like binomial coefficients here: each row undoes what the last one
    wrote, without decay."""
    spec, worlds = SPECS["even"], [World(SPECS["even"], torch.float32, device, lengths=[[128, 1]]) for _ in range(2)]
    for world in worlds:
        world.rows[0][:, : spec.mixed - spec.values] = 1.0
        world.rows[0][:, spec.mixed : spec.mixed + spec.num_value_heads] = 9.0
        world.rows[0][:, spec.mixed + spec.num_value_heads :] = -9.0
    got, want = (world.run(run) for world, run in zip(worlds, (by_scan, by_reference)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", WIDE)
def test_shapes_that_people_run(name, dtype, near):
    compare(WIDE[name], dtype, "cuda", near=near, kernel=by_scan, lengths=wide_lengths())


def test_rejected_drafts_change_no_bit(device):
    plain = World(SPECS["even"], torch.float32, device).run(by_kernel)
    assert torch.equal(World(SPECS["even"], torch.float32, device).run(by_kernel, drafts=3), plain)


# Decodes, drafts that fit behind waiting rows and such that do not, and long spans that start behind some.
DECODES = ([1, 1, 1, 1, 1, 1, 17, 1, 1], [5, 1, 1, 9, 1, 16, 1, 1, 1], [20, 1, 1, 1, 18, 1, 2, 3, 1])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("waiting", [1, 2, 4, 16])
def test_rows_wait_before_a_state_is_written(waiting, many, device, monkeypatch):
    """All planes are as the reference leaves them, and no bit of a row's result depends on how many rows wait. A scan
    takes waiting rows into its chunks, so only row by row that also holds for long spans."""
    monkeypatch.setattr(gated_rows, "MANY_SPANS", 1)  # for the form that is not exact
    usual, near = (by_scan, 1e-4) if many else (by_kernel, 1e-5)
    kernel = partial(usual, waiting=waiting)
    compare(SPECS["even"], torch.float32, device, near, kernel, waiting, lengths=DECODES)
    lengths = [[min(n, LOOK_AHEAD) for n in own] for own in DECODES] if many else DECODES
    at_once = World(SPECS["even"], torch.float32, device, lengths=lengths).run(partial(usual, waiting=1))
    for drafts in (0, 3):
        found = World(SPECS["even"], torch.float32, device, lengths=lengths).run(kernel, drafts)
        assert torch.equal(found, at_once)


def test_many_spans_wait_except_in_exact_mode(device, monkeypatch):
    monkeypatch.setattr(gated_rows, "MANY_SPANS", 3)
    compare(SPECS["channels"], torch.float32, device, 1e-4, by_scan, gated_rows.WAITING, lengths=DECODES)
    compare(SPECS["channels"], torch.float32, device, lengths=DECODES)
    worlds = [World(SPECS["even"], torch.bfloat16, device, lengths=DECODES) for _ in range(2)]
    assert torch.equal(worlds[0].run(row_by_row), worlds[1].run(by_kernel))


def late(start, base, length, waiting, AHEAD):
    return (start > 0) & (start - base + length <= AHEAD)


@pytest.mark.parametrize("stays", [lambda *_: False, late])
def test_states_that_are_written_at_other_steps_would_fail(stays, device, monkeypatch):
    """The mutations that the comparison must catch: states that are written at once, or when the slots are full."""
    if device != "cpu":
        pytest.skip("only the interpreter takes another function")
    monkeypatch.setattr(gated_rows, "_stays", stays)
    with pytest.raises((AssertionError, IndexError)):
        compare(SPECS["even"], torch.float32, device, kernel=partial(by_kernel, waiting=2), waiting=2, lengths=DECODES)


def test_rows_may_lie_in_a_wider_product(device):
    """The rows of a mixer whose gate after the recurrence comes from the same product."""

    def wider(world, rows, *given):
        wide = torch.cat((rows, torch.full_like(rows[:, :8], float("nan"))), 1)
        return by_scan(world, wide[:, : rows.shape[1]], *given)

    compare(SPECS["even"], torch.float32, device, near=1e-4, kernel=wider, lengths=LONG)
    compare(SPECS["even"], torch.float32, device, kernel=wider, lengths=[[3, 1, 1, 2]] * 3)


def test_a_state_without_decay_would_fail(monkeypatch, device):
    """The mutation that the comparison must catch."""
    real = check_delta.step_reference

    def wrong(rows, planes, pages, starts, lengths, weights, exact, **more):
        still = Weights(weights.conv_CJ, weights.log_decay_H - 9, weights.bias_N, weights.key_heads)
        return real(rows, planes, pages, starts, lengths, still, exact, **more)

    monkeypatch.setattr(check_delta, "step_reference", wrong)
    with pytest.raises(AssertionError):
        compare(SPECS["even"], torch.float32, device)
