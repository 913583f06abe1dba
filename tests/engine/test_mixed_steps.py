"""Steps of prompts and decodes in pieces, captured except for attention: the same tokens, whatever pads them."""

from __future__ import annotations

import pytest
import torch

from kvasir.bench.workloads import SHAPES
from kvasir.engine.ways.batch import Packer
from kvasir.engine.ways.capture import EAGER_STEPS
from kvasir.engine.ways.mixed_steps import MixedSteps, most_rows, sizes
from kvasir.models.families import build_spec
from kvasir.types import Sequence, Span
from tests import checkpoints
from tests.engine.driver import Driver
from tests.engine.stepwise import Stepwise
from tests.engine.test_overlap import KINDS, fleet, outcome
from tests.speculation import helpers
from tests.speculation.helpers import Hostile, WithGuests


def forced(driver: Driver) -> list[int]:
    """Capture at a size's first use. Returns the sizes of the steps that ran, as they run."""
    mixed, ran = driver.engine.runner.way(MixedSteps), []
    mixed._uses.update(dict.fromkeys(mixed.sizes, EAGER_STEPS))
    forward = mixed.forward

    def counted(frame, batch):
        ran.append((frame.rows, sum(batch.lengths)))
        return forward(frame, batch)

    mixed.forward = counted
    return ran


@pytest.fixture(scope="module")
def alone():
    """Run every request by itself, kernel by kernel, and read each step at once."""
    driver = Driver(overlap=False, max_num_batched_tokens=512, enable_prefix_caching=False)
    for request in fleet(driver, KINDS):
        driver.run([request])
    return outcome(driver)


@pytest.mark.parametrize(
    "options",
    [
        dict(overlap=False),
        dict(overlap=True),
        dict(overlap=True, static=True),
        dict(overlap=True, kv_codec="int8"),
        dict(overlap=True, max_num_batched_tokens=33),
    ],
    ids=str,
)
def test_same_tokens(options, alone):
    driver = Driver(**{"pieces": True, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options)
    if "kv_codec" in options:
        plain = Driver(overlap=False, max_num_seqs=8, max_num_batched_tokens=64, kv_codec=options["kv_codec"])
        plain.run(fleet(plain, KINDS), gap=1)
        alone = outcome(plain)
    ran = forced(driver)
    driver.run(fleet(driver, KINDS), gap=1)
    assert outcome(driver) == alone
    assert len(ran) >= 9 and any(rows < size for size, rows in ran), "nothing was padded"


@pytest.mark.parametrize("guests", [False, True])
def test_trees_beside_prompts(guests):
    """Steps that hold trees, alone or with prompts, run in pieces, too. Negative control: without the bits of ancestors
    the rows of a tree see each other."""
    expected = helpers.plain(1.0)
    told = {key: tokens for key, (tokens, _) in expected.items()}

    def run(blind: bool) -> tuple[dict, int]:
        driver = helpers.driver("replay", pieces=True, max_num_seqs=8, max_num_batched_tokens=48)
        drafter = WithGuests(told, driver.engine.runner.model.spec.hidden_size) if guests else Hostile(told)
        helpers.install(driver, drafter)
        mixed = driver.engine.runner.way(MixedSteps)
        mixed._uses.update(dict.fromkeys(mixed.sizes, EAGER_STEPS))
        forward, with_trees = mixed.forward, []

        def seen(frame, batch):
            if batch.ancestors is not None:
                with_trees.append(any(batch.prompts))
                batch.ancestors = None if blind else batch.ancestors
            return forward(frame, batch)

        mixed.forward = seen
        driver.run(helpers.requests(driver, 1.0), gap=1, preempt_every=7)
        assert not driver.engine.proposals.drafting._failures and False in with_trees
        found, stats = helpers.outputs(driver), driver.engine.stats()
        driver.close()
        assert blind or stats.accepted_tokens > 10
        return found, sum(with_trees)

    found, beside_prompts = run(blind=False)
    assert found == expected and beside_prompts
    assert run(blind=True)[0] != expected


def test_trees_of_more_rows_than_bits_of_a_word_run_elsewhere():
    driver = Driver(pieces=True, max_num_seqs=8, max_num_batched_tokens=512)
    mixed = driver.engine.runner.way(MixedSteps)
    mixed._uses.update(dict.fromkeys(mixed.sizes, EAGER_STEPS))
    for rows, taken in ((64, True), (65, False)):
        tree = span(driver, rows)
        tree.parents = [-1, *[0] * (rows - 1)]
        assert (mixed.frame([tree]) is not None) == taken
    driver.close()


def test_preemption_and_a_tight_pool(alone):
    driver = Driver(
        pieces=True, overlap=True, max_num_seqs=8, num_pages=14, max_model_len=112, max_num_batched_tokens=40
    )
    ran = forced(driver)
    driver.run(fleet(driver, KINDS), gap=1, preempt_every=5)
    assert outcome(driver) == alone and ran


def test_padding_reads_and_harms_nothing(alone):
    """The dummy page and the last step's rows may hold anything. As a control, padding that writes to a page in use is
    seen."""

    def run(harm: bool) -> dict:
        driver = Driver(pieces=True, overlap=False, max_num_seqs=8, max_num_batched_tokens=64)
        forced(driver)
        runner = driver.engine.runner
        mixed, packer = runner.way(MixedSteps), runner.parts.packer
        forward, pack = mixed.forward, packer.pack

        def poisoned(frame, batch):
            runner.pool.poison(0, [0])
            for out in mixed._outs.values():
                out[sum(batch.lengths) :] = float("nan")
            return forward(frame, batch)

        def packed(spans, frame=None):
            batch = pack(spans, frame)
            if harm and frame is not None:
                batch.slots[0][sum(batch.lengths) :] = batch.slots[0][0]
            return batch

        mixed.forward, packer.pack = poisoned, packed
        driver.run(fleet(driver, KINDS), gap=1)
        found = {
            key: (out.tokens, out.finish_reason, out.logprobs, out.prompt_logprobs)
            for key, out in driver.outputs.items()
        }
        driver.close()
        return found

    assert run(False) == alone
    assert run(True) != alone


@pytest.mark.parametrize("variant", ["gemma3_text", "qwen3_moe"])
def test_windows_and_experts(variant, tmp_path):
    folder, found = str(checkpoints.write(tmp_path, variant)), []
    for pieces in (False, True):
        driver = Driver(
            folder,
            pieces=pieces,
            overlap=True,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_pages=64,
            max_model_len=96,
        )
        ran = forced(driver) if pieces else None
        driver.run(
            [
                driver.request(
                    f"r{i}", [3 + (7 * i + 3 * j) % 90 for j in range(3 + 9 * i)], temperature=1.0, max_tokens=9, seed=i
                )
                for i in range(6)
            ],
            gap=1,
        )
        assert ran is None or len(ran) >= 5
        found.append({key: out.tokens for key, out in driver.outputs.items()})
        driver.close()
    assert found[0] == found[1] and len(found[0]) == 6


def test_when_sizes_are_captured():
    driver = Driver(pieces=True, overlap=False, max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_caching=False)
    mixed = driver.engine.runner.way(MixedSteps)
    capture = mixed._capture
    assert isinstance(capture, Stepwise) and mixed.sizes == [*range(32, 513, 32)]

    def prompt(rows: int) -> None:
        driver.outputs.clear()
        driver.run([driver.request("p", [300] * rows, max_tokens=1)])

    assert not driver.engine.idle(), "never before the first request"
    for rows in [40, 100, 128, 70][:EAGER_STEPS]:
        prompt(rows)
    assert not mixed._ready, "a size that passes by is not captured"
    prompt(40)
    assert list(mixed._ready) == [128], "the one that stands in for those below"
    assert [mixed.frame([span(driver, n)]).rows for n in (1, 96, 128)] == [128] * 3
    assert mixed.frame([span(driver, 129)]) is None and mixed._uses[256] == 1
    assert mixed.frame([span(driver, 513)]) is None, "beyond the largest"
    assert driver.engine.idle() and list(mixed._ready)[-1] == 256, "coarse ones first"
    left = 1
    while driver.engine.idle():
        left += 1
    assert left == len(mixed.sizes) - 1 and sorted(mixed._ready) == mixed.sizes
    assert mixed.frame([span(driver, 40)]).rows == 64, "its own"
    driver.close()


def test_a_step_ahead_of_the_last_token_does_not_keep_an_idle_engine_from_capturing():
    """A request that ends by a stop token leaves the step that was launched behind it. Whoever reads no further, as
    ``LLM`` does, has an idle engine all the same."""
    driver = Driver(pieces=True, overlap=True, max_num_seqs=8, max_num_batched_tokens=64)
    driver.run([driver.request("known", [300] * 9, temperature=0.0, max_tokens=6)])
    stop = driver.outputs["known", 0].tokens[4]
    driver.submit(driver.request("r", [300] * 9, temperature=0.0, max_tokens=60, stop_token_ids=[stop]))
    while ("r", 0) not in driver.outputs or driver.outputs["r", 0].finish_reason is None:
        driver.step()
    engine = driver.engine
    assert engine.num_in_flight == 1 and engine.idle() and not engine.num_in_flight
    assert (
        engine.scheduler.num_running == 0 and engine.pages.num_free + engine.pages.num_cached == engine.pages.num_total
    )
    driver.close()


def span(driver: Driver, rows: int) -> Span:
    seq = Sequence(driver.request("s", [300] * min(rows, 400)))
    return Span(seq, 0, rows, want={"sample": range(rows - 1, rows)}, seat=0)


def test_a_failed_capture_leaves_the_engine_running(alone, caplog):
    class Broken(Stepwise):
        def pieces(self, work):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    driver = Driver(pieces=True, overlap=True, max_num_seqs=8, max_num_batched_tokens=64)
    driver.engine.runner.way(MixedSteps)._capture = Broken()
    ran = forced(driver)
    driver.run(fleet(driver, KINDS), gap=1)
    assert outcome(driver) == alone and not ran and "no more CUDA graphs of mixed steps" in caplog.text


def test_sizes():
    for most in (1, 32, 33, 512, 600, 3500, 8192):
        found = sizes(most)
        assert found[-1] >= most and (len(found) == 1 or found[-2] < most)
        assert all(b / a <= 1.0625 for a, b in zip(found, found[1:]) if a >= 512)


def test_large_models_are_launched_as_they_are():
    gpu = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvasir.engine.ways.mixed_steps.rates", lambda device, dtype: (4.8e12, 989e12))
        most = {
            name: most_rows(build_spec(SHAPES[name]), gpu, torch.bfloat16, 8192) for name in ("qwen3-0.6b", "llama-8b")
        }
    assert most["qwen3-0.6b"] == 8192 and 900 < most["llama-8b"] < 1300


def test_a_framed_batch_lies_where_the_frame_says():
    driver = Driver(pieces=True, max_num_seqs=8)
    mixed = driver.engine.runner.way(MixedSteps)
    frame = mixed._frame(64)
    seq_span = span(driver, 40)
    seq_span.seq.tables = [[5, 6, 7]]
    batch = Packer(16, 1, "cpu").pack([seq_span], frame)
    plain = Packer(16, 1, "cpu").pack([seq_span])
    ids, positions, slots, wanted, variants, _ = frame.parts(1)
    assert variants is None
    for framed, held, bare in (
        (batch.input_ids, ids, plain.input_ids),
        (batch.positions, positions, plain.positions),
        (batch.slots[0], slots[0], plain.slots[0]),
    ):
        assert framed.data_ptr() == held.data_ptr() and torch.equal(framed[:40], bare) and not framed[40:].any()
    assert batch.logit_rows.data_ptr() == wanted.data_ptr() and wanted.tolist() == [39] + [0] * (frame.wanted - 1)
    driver.close()
