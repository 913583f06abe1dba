"""A server behind a URL as an endpoint: ours on a real port, and a foreign one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Prompt, Sampling
from kvasir.scaling.http_endpoint import HTTPEndpoint
from kvasir.scaling.ledger import Budget
from kvasir.scaling.primitives import Context, EndpointDown, Run, opened
from kvasir.scaling.problem import Problem
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from tests.api.running import running
from tests.scaling.tabular import Tabular, table
from tests.scaling.test_layer import SAMPLING


def ask(text: str) -> tuple:
    return ({"role": "user", "content": f"say: {text}"},)


def in_context(url: str, job, *, retries: int = 2, budget: Budget | None = None, **options):
    async def main():
        endpoint = HTTPEndpoint(url, "fake", **options)
        async with opened([endpoint]):
            run = Run([endpoint], seed=1, sampling=Sampling(max_tokens=64), retries=retries, pause=0.0)
            context = Context(run, "p0", budget=budget)
            return await job(context, endpoint), context.ledger.total()

    return asyncio.run(main())


def test_samples_of_our_server_with_its_own_counts():
    with running() as server:
        found, total = in_context(server.url + "/v1", lambda c, e: c.sample(e, ask("hello world"), 3))
        assert [s.text for s in found] == ["hello world"] * 3 and all(
            s.finish == "stop" and s.confidence is not None for s in found
        )
        seen = server.engine.seen
        assert len({r.seed for r in seen}) == 3 and all(r.params.logprobs == 20 and r.max_tokens == 64 for r in seen)
        tokens = len(server.service.text.tokenizer.encode("hello world")) + 1
        assert total["generated"] == 3 * tokens and [s.tokens for s in found] == [tokens] * 3
        assert total["uncached"] + total["cached"] == sum(len(r.prompt_ids) for r in seen)
        in_context(server.url + "/v1", lambda c, e: c.sample(e, ask("hello world"), 2))
        # Sample i has the same seed for every n; samples arrive in any order.
        assert len(seen) == 5 and len({r.seed for r in seen}) == 3
        server.idle()


def test_a_group_closes_the_others_connections():
    async def job(context, endpoint):
        return await context.sample(endpoint, ({"role": "user", "content": "something"},), 4, finish_after=1)

    with running() as server:
        server.engine.delay = 0.01
        found, total = in_context(server.url + "/v1", job)
        server.idle()
        assert sum(s.met is not None for s in found) == 1 and total["generated"] == next(
            s.tokens for s in found if s.met is not None
        )


def test_what_the_server_refuses_and_what_no_server_can_do():
    with running() as server:
        found, total = in_context(server.url + "/v1", lambda c, e: c.sample(e, ask("x " * 5000)))
        assert found == [] and not total["calls"]
        assert in_context(server.url + "/v1", lambda c, e: c.sample(e, ask("x"), stop=("\n",)))[0] == []
        assert in_context(server.url + "/v1", lambda c, e: c.choose(e, ask("x"), ("Yes", "No")))[0] is None

        async def go_on(context, endpoint):
            return context.open(endpoint, ask("x"))

        with pytest.raises(ConfigError, match="takes no token ids"):
            in_context(server.url + "/v1", go_on)
    with pytest.raises(ConfigError, match="no OpenAI-compatible server answers"):
        in_context(server.url + "/v1", lambda c, e: c.sample(e, ask("x")))
    for url, model in (("ftp://x", "m"), ("http://x", "")):
        with pytest.raises(ConfigError, match="URL#NAME"):
            HTTPEndpoint(url, model)


class Foreign:
    """A server of a few lines. ``replies``: the answer to each completion, in order; the last one repeats."""

    def __init__(self, *replies: tuple[int, str]) -> None:
        self.replies, self.bodies = list(replies), []

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"

    async def __aexit__(self, *_) -> None:
        self.server.close()

    async def answer(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
        body = await reader.readexactly(length)
        status, text = 200, "{}"
        if body:
            self.bodies.append(json.loads(body))
            status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()


def chunk(text: str = "", finish: str | None = None, **more) -> str:
    return (
        "data: "
        + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more})
        + "\n\n"
    )


GOOD = chunk("Answer: ") + chunk("7") + chunk(finish="stop") + "data: [DONE]\n\n"
BROKEN = [
    (503, "busy"),
    (429, "slow down"),
    (200, chunk("Ans")),
    (200, "data: {nonsense\n\n"),
    (200, 'data: {"error": {"message": "boom"}}\n\n'),
    (500, ""),
]


@pytest.mark.parametrize("broken", BROKEN, ids=["503", "429", "cut off", "malformed", "error in the stream", "500"])
def test_a_server_that_fails_is_asked_again_and_a_dead_one_ends_the_run(broken):
    async def main(*replies):
        async with Foreign(*replies) as url:
            endpoint = HTTPEndpoint(url, "other", logprobs=False)
            async with opened([endpoint]):
                return await solve(
                    load_strategy("majority:n=1"),
                    [Problem("p0", ask("x"))],
                    [endpoint],
                    retries=2,
                    pause=0.0,
                    sampling=SAMPLING,
                )

    found = asyncio.run(main(broken, broken, (200, GOOD)))
    assert (
        found.solved[0].result.answer == "7"
        and found.ledger.total()["generated"] == 2
        and found.solved[0].result.sample.confidence is None
    )
    with pytest.raises(EndpointDown, match="other failed 3 times"):
        asyncio.run(main(broken))


def test_a_distribution_over_options_from_the_likeliest_tokens():
    top = [
        {"token": " Yes", "logprob": math.log(0.6)},
        {"token": "No", "logprob": math.log(0.2)},
        {"token": "x", "logprob": math.log(0.1)},
    ]
    line = (
        "data: "
        + json.dumps(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {},
                        "logprobs": {"content": [{"token": " Yes", "logprob": top[0]["logprob"], "top_logprobs": top}]},
                        "finish_reason": "length",
                    }
                ]
            }
        )
        + "\n\n"
    )

    async def main():
        async with Foreign((200, line)) as url:
            endpoint = HTTPEndpoint(url, "other")
            async with opened([endpoint]):
                return await Context(Run([endpoint]), "p0").choose(endpoint, ask("x"), ("Yes", "No"))

    assert math.isclose(math.exp(asyncio.run(main())["Yes"]), 0.75)


def test_several_tokens_of_a_delta_are_one_chunk():
    """Tokens are counted by their log-probabilities; each has a confidence from its alternatives."""

    def entry(*top: float) -> dict:
        return {"token": "x", "logprob": top[0], "top_logprobs": [{"token": "x", "logprob": p} for p in top]}

    def delta(text: str, *entries: dict) -> str:
        return (
            "data: "
            + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": entries}}]})
            + "\n\n"
        )

    stream = (
        delta("Answer: ", entry(-0.5, -1.5), entry(-1.0, -2.0), entry(-0.25, -0.75))
        + delta("7", entry(-2.0, -4.0))
        + chunk(finish="stop")
    )

    async def main():
        async with Foreign((200, stream)) as url:
            endpoint = HTTPEndpoint(url, "other")
            async with opened([endpoint]):
                counts = [c.count async for c in endpoint.draw(Prompt(ask("x")), 1, SAMPLING, 0)]
                context = Context(Run([endpoint]), "p0")
                return counts, (await context.sample(endpoint, ask("x")))[0], context.ledger.total()["generated"]

    counts, sample, generated = asyncio.run(main())
    assert counts == [3, 1, 0] and (sample.text, sample.tokens, generated) == ("Answer: 7", 4, 4)
    assert sample.logprob == -3.75 and sample.confidence == pytest.approx((1.0 + 1.5 + 0.5 + 3.0) / 4)


def test_a_local_and_a_remote_model_in_one_strategy():
    async def main():
        async with Foreign((200, chunk("..1", "stop"))) as url:
            remote = HTTPEndpoint(url, "remote", logprobs=False)
            async with opened([remote]):
                from tests.scaling.tabular import problem

                return await solve(
                    load_strategy("squeeze_evolve:N=4,K=2,T=3,p=50"),
                    [problem()],
                    [Tabular("small", table(0.3)), remote],
                    seed=2,
                    sampling=SAMPLING,
                    pause=0.0,
                )

    found = asyncio.run(main())
    kinds = {(c.endpoint, c.kind) for c in found.ledger.charges}
    assert kinds == {("small", "sample"), ("small", "score"), ("remote", "sample")} and found.solved[0].result.answer
