"""The step-time model on synthetic steps: it learns, survives outliers and follows changes, and its chunks keep the
budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvasir.engine.schedule.step_time import TILE_ROWS, Roofline, StepShape, StepTimeModel, retry_after, step_budget

# Llama-8B in bf16 on an H200: bytes/s, FLOP/s, bytes of weights, FLOP a row, FLOP a pair, KV bytes a token.
ROOFLINE = Roofline(4.8e12, 989e12, 16e9, 2 * 8e9, 4 * 32 * 128 * 32, 2 * 8 * 128 * 2 * 32)
TRUE = np.array([4.2e-3, 2.4e-5, 1.1e-9, 6.1e-8, 7e-6])


def shapes(count, rng, prefill=0.3):
    found = []
    for _ in range(count):
        spans = [(int(c), 1) for c in rng.integers(10, 8000, rng.integers(1, 128))]
        if rng.random() < prefill:
            spans += [(int(rng.integers(0, 30_000)), int(rng.integers(2, 2048)))]
        found.append(StepShape.of(spans))
    return found


def truth(shape, coefficients=TRUE):
    return float(ROOFLINE.vector(shape) @ coefficients)


def learn(model, found, rng, noise=0.02, coefficients=TRUE, outliers=0.0):
    for shape in found:
        factor = rng.uniform(5, 50) if rng.random() < outliers else 1 + noise * rng.standard_normal()
        model.observe(shape, truth(shape, coefficients) * max(0.5, factor))


def mape(model, found, coefficients=TRUE):
    return float(np.mean([abs(model.predict(s) / truth(s, coefficients) - 1) for s in found]))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_shapes_count_what_attention_reads():
    shape = StepShape.of([(100, 1), (7, 1), (1000, 200)])
    assert shape == StepShape(202, 200 * 1100.0, 107, 3) == StepShape.of([(100, 1), (7, 1)]).plus(1000, 200)


def test_the_prior_is_of_the_right_order_and_learning_beats_it(rng):
    model, probe = StepTimeModel(ROOFLINE), shapes(300, rng)
    before = mape(model, probe)
    assert 0.02 < before < 0.6 and model.relative_error() is None
    learn(model, shapes(300, rng), rng)
    after = mape(model, probe)
    assert after < 0.01 < before
    assert model.relative_error() == pytest.approx(0.016, abs=0.01)  # the mean of |2 % noise|


def test_of_a_mixture_few_rows_read_few_experts():
    """58 of 60 GB are experts, a sixteenth of which a row uses. Measured steps agree with the prior from the start."""
    mixture = replace(ROOFLINE, weight_bytes=60e9, row_flops=6e9, routed=((15 / 16, 58e9),))
    model, shape = StepTimeModel(mixture), {n: StepShape(rows=n, sequences=n) for n in (1, 8, 64)}
    expected = {n: (2e9 + 58e9 * (1 - (15 / 16) ** n)) / (0.8 * 4.8e12) for n in shape}
    for n in shape:
        assert expected[n] < model.predict(shape[n]) < 1.1 * expected[n]
    for _ in range(300):
        model.observe(shape[64], 2 * expected[64])
    assert model.predict(shape[1]) == pytest.approx(2 * expected[1], rel=0.1)
    assert mixture.bound(shape[64]) < model.predict(shape[8]), "all rows may fall on the same experts"


def test_graph_steps_have_their_own_coefficients(rng):
    model, shape = StepTimeModel(ROOFLINE), StepShape.of([(500, 1)] * 8)
    eager = model.predict(shape)
    for _ in range(200):
        model.observe(shape, 5e-3, graph=True)
    assert model.predict(shape, graph=True) == pytest.approx(5e-3, rel=0.01) and model.predict(shape) == eager


def test_outliers_do_little_harm(rng):
    model, probe = StepTimeModel(ROOFLINE), shapes(300, rng)
    learn(model, shapes(600, rng), rng, outliers=0.03)
    assert mape(model, probe) < 0.05
    assert model.relative_error() > 0.02  # the metric shows the errors


def test_a_lasting_change_is_followed(rng):
    model, probe, slower = StepTimeModel(ROOFLINE), shapes(200, rng), TRUE * np.array([1.5, 1.0, 1.0, 2.0, 1.0])
    learn(model, shapes(1500, rng), rng)
    assert mape(model, probe, slower) > 0.15
    learn(model, shapes(4000, rng), rng, coefficients=slower)
    assert mape(model, probe, slower) < 0.02


def test_hours_of_one_shape_leave_the_rest_sane(rng):
    """Forgetting without news neither blows up nor unlearns: after 20,000 equal steps prompts are still predicted."""
    model, probe = StepTimeModel(ROOFLINE), shapes(200, rng)
    learn(model, shapes(500, rng), rng)
    learn(model, [StepShape.of([(500, 1)] * 16)] * 20_000, rng)
    assert mape(model, probe) < 0.25
    learn(model, shapes(200, rng), rng)
    assert mape(model, probe) < 0.02


def test_never_below_the_roofline_nor_with_negative_costs(rng):
    model = StepTimeModel(ROOFLINE)
    for shape in shapes(300, rng):
        model.observe(shape, 1e-4)  # a clock that lies
    for shape in shapes(100, rng):
        assert model.predict(shape) >= ROOFLINE.bound(shape)
        assert model.predict(shape.plus(100, 500)) >= model.predict(shape)
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(StepShape.of([(1, 1)]), nonsense)
    assert np.isfinite(model.predict(StepShape.of([(1, 1)])))


def test_chunks_are_the_largest_that_fit(rng):
    model = StepTimeModel(ROOFLINE)
    learn(model, shapes(500, rng), rng)
    for running in shapes(20, rng, prefill=0):
        for start, budget in ((0, 0.02), (20_000, 0.03), (0, 0.2)):
            rows = model.chunk_for(budget, running, start, 8192)
            if rows:
                assert model.predict(running.plus(start, rows)) <= budget
            one_tile_more = rows + TILE_ROWS
            assert rows == 8192 or model.predict(running.plus(start, one_tile_more)) > budget
            if running.rows + rows >= TILE_ROWS and rows < 8192:
                assert (running.rows + rows) % TILE_ROWS == 0
    running = StepShape.of([(500, 1)] * 20)
    assert model.chunk_for(1e-4, running, 0, 100) == 0 and model.chunk_for(10.0, running, 0, 100) == 100
    assert model.chunk_for(10.0, running, 0, 0) == 0
    deep, shallow = (model.chunk_for(0.03, running, start, 8192) for start in (60_000, 0))
    assert 0 < deep < shallow  # the same time buys fewer rows further into a prompt


def test_steps_held_up_now_and_then_do_not_drive_it_away(rng):
    """Cutting a term to zero does not inflate the others, which would let predictions grow to minutes in a hundred
    steps.

    Decodes take 4.5 ms, and one in twelve waits for a launch of 20 ms.
    """
    model = StepTimeModel(ROOFLINE)
    for i in range(3000):
        sequences = rng.choice((64, 64, 64, 60, 48, 30, 8, 1))
        shape = StepShape(
            rows=-(-sequences // 8) * 8, decode_context=int(sequences * rng.uniform(60, 140)), sequences=sequences
        )
        model.observe(shape, rng.uniform(0.0043, 0.0047) if i % 12 else 0.02, graph=True)
        if i > 50:
            assert model.predict(shape, graph=True) < 0.04, i


def test_the_wait_for_a_first_token_is_the_sum_of_its_steps(rng):
    model, running = StepTimeModel(ROOFLINE), StepShape.of([(500, 1)] * 8)
    learn(model, shapes(300, rng), rng)

    def alone(start, length):
        return model.predict(running.plus(start, length))

    assert model.time_to_first_token(0, 100, running, 2048) == alone(0, 100)
    assert model.time_to_first_token(0, 3000, running, 2048) == pytest.approx(alone(0, 2040) + alone(2040, 960))
    assert model.time_to_first_token(5000, 100, running, 2048) == pytest.approx(
        2 * alone(0, 2040) + alone(0, 920) + alone(0, 100)
    )
    assert model.time_to_first_token(0, 0, running, 4) > 0


def test_budget_and_admission():
    assert step_budget(0.1, []) == pytest.approx(0.09) and step_budget(0.1, [0.02, 0.06]) == pytest.approx(0.036)
    assert step_budget(0.1, [0.2]) == 0.0
    assert retry_after(1.0, 1.0) is None and retry_after(1.1, 1.0) == 1 and retry_after(9.2, 1.0) == 9
