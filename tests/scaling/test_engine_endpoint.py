"""The engine as an endpoint, with the smallest packaged model: what the layer is told is what the engine did."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Prompt, Refused, Sampling
from kvasir.scaling.engine_endpoint import FEATURES, ClientEndpoint, EngineEndpoint
from kvasir.scaling.primitives import Context, Run, opened
from kvasir.scaling.problem import Problem
from kvasir_lab.lookup import load_task
from tests.client.helpers import beat

QUESTION = load_task("countdown").problems("test", 3, 1)[0]
MESSAGES = QUESTION.messages


def engine(**options) -> EngineEndpoint:
    return EngineEndpoint(
        EngineConfig.of(
            model="nano", device="cpu", batch_invariant=True, max_model_len=512, cpu_cache_bytes=1 << 25, **options
        )
    )


async def settled(endpoint: EngineEndpoint):
    """The engine's counters, after a heartbeat has brought the last of them."""
    await beat(endpoint.engine.replica)
    return endpoint.engine.stats()


def test_the_engine_endpoint():
    """One engine process for all checks, because starting one takes seconds."""
    asyncio.run(everything())


async def everything():
    endpoint = engine()
    async with opened([endpoint]):
        await counters(endpoint)
        await streams(endpoint)
        await scores(endpoint)
        await sequences(endpoint)
        await refusals(endpoint)
        await forgetting(endpoint)
        await features(endpoint)


async def features(endpoint):
    """Replies and scores are the same without each feature; only the cost differs.

    The features are the fork, the engine's own group, and the score as one record.
    """
    told = {}
    for without in ((), ("fork",), ("group",), ("score",), FEATURES):
        other = ClientEndpoint(
            endpoint.engine,
            endpoint.tokenizer,
            "nano",
            parameters=endpoint.parameters,
            without=without,
            tenant="-".join(without),
        )
        c = context(other)
        samples = await c.sample(other, MESSAGES, 4, stream=3, max_tokens=24)
        first = [s for s in await c.sample(other, MESSAGES, 6, stream=11, finish_after=2) if s.met is not None]
        score = await c.score(other, MESSAGES, samples[1])
        told[without] = [s.ids for s in samples], [(s.index, s.ids, s.met) for s in first], score, c.ledger.total()
    plain = told[()]
    for without, (samples, first, score, total) in told.items():
        assert samples == plain[0] and first == plain[1], without
        assert all(
            math.isclose(getattr(score, name), getattr(plain[2], name), rel_tol=1e-4)
            for name in ("confidence", "lowest", "logprob")
        )
        assert score.tokens == plain[2].tokens and total["scored"] == plain[3]["scored"]
        if "fork" in without:  # every sample asks for the prompt, although the prefix cache has it
            assert total["uncached"] + total["cached"] > plain[3]["uncached"] + plain[3]["cached"]
    assert told["score",][3]["uncached"] > plain[3]["uncached"], (
        "all of the prompt is computed for its log-probabilities"
    )
    assert told["group",][3]["discarded"] >= plain[3]["discarded"]
    with pytest.raises(ConfigError, match="fork, score, group"):
        ClientEndpoint(endpoint.engine, endpoint.tokenizer, "nano", without=("speed",))


def context(endpoint: EngineEndpoint) -> Context:
    return Context(Run([endpoint], seed=4, sampling=Sampling(max_tokens=48)), "p0")


async def counters(endpoint):
    """Conservation over samples, a group, a score, a choice and a cut sequence: the ledger has every token."""
    c, problem = context(endpoint), Problem("p0", MESSAGES)
    pool = await c.sample(endpoint, MESSAGES, 5)
    assert {s.finish for s in pool} <= {"stop", "length"} and all(
        s.tokens == len(s.ids) and s.confidence and s.logprob for s in pool
    )
    await c.sample(endpoint, MESSAGES, 6, finish_after=2)
    await c.score(endpoint, MESSAGES, pool[0])
    await c.choose(endpoint, problem.prompts.self_evaluate(problem, pool[0].text), ("Yes", "No"))
    seq = c.open(endpoint, MESSAGES)
    await seq.generate(until=("\n",))
    seq.truncate(0)
    stats, total = await settled(endpoint), c.ledger.total()
    assert total["generated"] + total["discarded"] == stats.generation_tokens
    assert total["uncached"] + total["cached"] == stats.prompt_tokens and total["cached"] == stats.cached_tokens > 0
    busy = await endpoint.busy_seconds()
    assert 0 < busy == await endpoint.busy_seconds(), "nothing runs"
    assert total["scored"] == pool[0].tokens and total["flops"] == 2 * endpoint.parameters * (
        total["uncached"] + stats.generation_tokens
    )


async def streams(endpoint):
    """n samples at once equal n prompts with the same streams.

    Sample i does not depend on n, also beyond one request.
    """
    draw = context(endpoint)
    many = [s.ids for s in await draw.sample(endpoint, MESSAGES, 18, max_tokens=8, stream=9)]
    few = [s.ids for s in await draw.sample(endpoint, MESSAGES, 3, max_tokens=8, stream=9)]
    assert many[:3] == few and len(set(many)) > 1
    full = await draw.sample(endpoint, MESSAGES, 6, stream=11)
    first = await draw.sample(endpoint, MESSAGES, 6, stream=11, finish_after=1)
    best = min((s.tokens, s.index) for s in full if s.finish == "stop")
    assert [(s.tokens, s.index) for s in first if s.met is not None] == [best] and first[best[1]].ids == full[
        best[1]
    ].ids
    # The engine sees the end itself: only branch 0 runs beyond it, because it leads by the step that computed the
    # prompt.
    assert all(s.tokens <= best[0] + (s.index == 0) for s in first)


async def scores(endpoint):
    """Confidence from decoding equals that from scoring, with a cold and a warm prefix cache."""
    c = context(endpoint)
    for sample in await c.sample(endpoint, MESSAGES, 3):
        for _ in range(2):
            score = await c.score(endpoint, MESSAGES, sample)
            assert (
                math.isclose(score.logprob, sample.logprob, rel_tol=1e-4, abs_tol=1e-4)
                and score.tokens == sample.tokens
            )
            assert math.isclose(score.confidence, sample.confidence, rel_tol=1e-4)
    found = await c.choose(endpoint, MESSAGES, ("Yes", "No"))
    assert math.isclose(sum(map(math.exp, found.values())), 1.0, rel_tol=1e-4)


async def sequences(endpoint):
    """A reply written in pieces equals one written at once.

    A fork starts as its parent and continues on its own.
    """
    c = context(endpoint)
    whole = (await c.sample(endpoint, MESSAGES, 1, stream=21))[0]
    written = len(c.ledger.charges)
    seq = c.open(endpoint, MESSAGES)
    seq.stream = 21
    while not seq.done and seq.tokens < 48:
        await seq.generate(until=("\n",), max_tokens=48 - seq.tokens)
    assert (
        tuple(seq.ids) == whole.ids
        and seq.text == whole.text
        and len(seq.pieces) > 1
        and seq.sample().finish == whole.finish
    )
    assert [charge.uncached for charge in c.ledger.charges[written + 1 :]] == [1] * (len(seq.pieces) - 1), (
        "a paused reply goes on as a decode"
    )
    seq.truncate(1)
    forks = seq.fork(4)
    await c.map("fork", lambda scope, s: s.generate(scope=scope, max_tokens=12, temperature=3.0), forks)
    assert all(f.ids[: len(seq.ids)] == seq.ids for f in forks) and len({tuple(f.ids) for f in forks}) > 1


async def refusals(endpoint):
    c = context(endpoint)
    long = ({"role": "user", "content": "7 " * 600},)
    assert await c.sample(endpoint, long, 2) == [] and c.ledger.total()["calls"] == 0
    with pytest.raises(Refused, match="different tokens"):
        await endpoint.choose(Prompt(MESSAGES), ("Yes", "not one token at all"), None)
    assert await c.choose(endpoint, MESSAGES, ("Yes", "Yes")) is None


async def forgetting(endpoint):
    """A second call finds its prompt cached, one after ``forget`` does not, and all three give the same reply."""
    c, found, cached = context(endpoint), [], []
    for again in (False, False, True):
        if again:
            endpoint.forget()
        before = c.ledger.total()["cached"]
        found.append((await c.sample(endpoint, MESSAGES, 1, stream=5))[0].ids)
        cached.append(c.ledger.total()["cached"] - before)
    assert found[0] == found[1] == found[2] and cached[1] > 0 == cached[2]
