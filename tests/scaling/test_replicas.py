"""Replicas: a problem stays where its pages are and moves when that replica fails; no reply depends on the replica."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Caps, Prompt, Sampling
from kvasir.scaling.primitives import EndpointDown
from kvasir.scaling.replicas import ReplicaEndpoint
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from tests.scaling.tabular import Tabular, problem

SPECS = ("rsa:N=4,K=2,T=3", "best_of_n:n=4,by=self", "v1:N=4", "first_finish:n=3", "beam:N=4,width=2,steps=3")


def run(spec, endpoints, problems, **options):
    return asyncio.run(
        solve(load_strategy(spec), problems, endpoints, seed=5, sampling=Sampling(max_tokens=12), pause=0.0, **options)
    )


def problems(count):
    return [problem(f"p{i}", f"solve {i}") for i in range(count)]


@pytest.mark.parametrize("spec", SPECS)
def test_replies_are_those_of_one_and_every_call_is_counted(spec):
    alone = run(spec, [Tabular()], problems(6))
    parts = [Tabular(), Tabular(), Tabular()]
    shared = run(spec, [ReplicaEndpoint(parts)], problems(6))
    assert [s.result.text for s in shared.solved] == [s.result.text for s in alone.solved]
    total = shared.ledger.total()
    for ours, theirs in (("uncached", "uncached"), ("cached", "cached")):
        assert total[ours] == sum(p.counts[theirs] for p in parts)
    assert total["generated"] + total["discarded"] == sum(p.counts["generated"] for p in parts)
    assert all(part.counts["requests"] for part in parts), "problems are spread"
    asked = [{prompt for prompt in part.prompts if prompt.startswith("solve")} for part in parts]
    assert [len(prompts) for prompts in asked] == [2, 2, 2], "two problems each, and every one at one replica only"
    assert len(set.union(*asked)) == 6


def test_a_replica_that_fails_gives_its_problems_away():
    good, bad = Tabular(), Tabular(faults=10**6)
    done = run("majority:n=3", [ReplicaEndpoint([bad, good])], problems(4))
    alone = run("majority:n=3", [Tabular()], problems(4))
    assert [s.result.text for s in done.solved] == [s.result.text for s in alone.solved]
    assert bad.counts["requests"] == 2, "one try for each of its problems, and none after"
    assert done.ledger.total()["discarded"] > 0, "and that was paid"


def test_all_replicas_dead_end_the_run():
    with pytest.raises(EndpointDown):
        run("majority:n=3", [ReplicaEndpoint([Tabular(faults=10**6), Tabular(faults=10**6)])], problems(1))


def test_what_one_cannot_do_none_can_and_two_models_are_no_replicas():
    both = ReplicaEndpoint([Tabular(), Tabular(caps=Caps(logprobs=True))])
    assert both.caps == Caps(logprobs=True)
    with pytest.raises(ConfigError, match="--model of its own"):
        ReplicaEndpoint([Tabular("a"), Tabular("b")])
    assert both.most_prompt_tokens(Prompt(problem().messages, affinity="x")) == 1
