"""Ways to run a step: the first one that takes a step runs it, and what concerns all ways reaches each."""

from types import SimpleNamespace

import pytest

from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.start.build import ways_to_run
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.chain_graphs import ChainGraphs
from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.engine.ways.eager_steps import EagerSteps
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.engine.ways.native_steps import NativeSteps
from kvasir.engine.ways.step_way import CapturingWay, StepWay
from kvasir.kernels.native.library import native
from tests.engine.driver import Driver
from tests.engine.stepwise import Stepwise


class Watching(StepWay):
    """A new way in front of the others: takes steps of at least two decodes, and leaves the work to the last one."""

    def __init__(self, last: StepWay) -> None:
        self.last, self.ran, self.heard = last, [], []

    def takes(self, spans):
        return len(spans) > 1 and all(span.want is ONE_SAMPLE for span in spans)

    def run(self, spans):
        self.ran.append(len(spans))
        return self.last.run(spans)

    def use_taps(self, taps):
        self.heard.append(taps)

    def weights_changed(self):
        self.heard.append("weights")


def test_the_cheapest_launch_comes_first():
    d = Driver(batch_invariant=False)
    parts = d.engine.runner.parts
    found = [type(way) for way in ways_to_run(parts, call_through, 0, Stepwise(), 64)]
    order = [NativeDecodes, DecodeGraphs, ChainGraphs, MixedSteps, NativeSteps, DecodeTapes, EagerSteps]
    assert found == [kind for kind in order if native().library is not None or not kind.__name__.startswith("Native")]
    assert [type(way) for way in ways_to_run(parts)][-1] is EagerSteps
    d.close()


def test_exact_mode_knows_one_way():
    d = Driver()
    assert [type(way) for way in d.engine.runner.ways] == [EagerSteps]
    assert d.engine.runner.way(DecodeTapes) is None and d.engine.runner.graphs is None
    d.close()


def test_a_new_way_runs_what_it_takes():
    tokens = []
    for watched in (False, True):
        d = Driver()
        runner = d.engine.runner
        way = Watching(runner.ways[-1])
        if watched:
            runner.use([way, *runner.ways])
        d.run([d.request(f"r{i}", [300 + i] * (5 + i), max_tokens=12, seed=i) for i in range(3)])
        tokens.append({key: out.tokens for key, out in d.outputs.items()})
        assert bool(way.ran) == watched and all(count > 1 for count in way.ran)
        d.close()
    assert tokens[0] == tokens[1]


def test_every_way_hears_of_taps_and_new_weights():
    d = Driver()
    runner = d.engine.runner
    ways = [Watching(runner.ways[-1]), Watching(runner.ways[-1]), *runner.ways]
    runner.use(ways)
    runner.listen((0,))
    runner.weights_changed()
    assert all(way.heard == [runner.parts.taps, "weights"] for way in ways[:2])
    d.close()


class Capturing(CapturingWay):
    def __init__(self, most: int) -> None:
        self.most = most

    def takes(self, spans):
        return False

    def run(self, spans):
        raise AssertionError

    def capture_next(self):
        self.captures += self.captures < self.most
        return self.captures < self.most

    def measure(self):
        return 0, 0


def test_ways_capture_in_turns():
    d = Driver()
    runner, (one, other) = d.engine.runner, (Capturing(9), Capturing(9))
    runner.use([one, other, *runner.ways])
    for turn in range(1, 7):
        assert runner.capture_next() and runner.captures == turn
        assert abs(one.captures - other.captures) <= 1
    d.close()


def test_the_last_way_must_take_every_step():
    d = Driver()
    runner = d.engine.runner
    runner.use(runner.ways[:-1])
    with pytest.raises(AssertionError, match="the last way"):
        runner.launch(SimpleNamespace(spans=[]))
    d.close()
