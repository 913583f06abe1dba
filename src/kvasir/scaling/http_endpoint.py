"""Any OpenAI-compatible server as an endpoint: streamed chat completions, one request for each sample.

One request for each sample lets a single sample be cancelled. Needs httpx. Token ids stay behind the API, so replies
cannot be continued (`Seq`) and nothing is scored. A sample's tokens are counted by its log-probabilities if the server
gives them, otherwise by pieces of text. Prompt tokens come from the server's usage, or are an upper bound when a
cancelled stream never sent it. Seeds are sent; the server decides whether to use them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import (
    Caps,
    Chunk,
    Draw,
    Endpoint,
    EndpointError,
    Group,
    Prompt,
    Refused,
    Sampling,
    Usage,
    confidence_of,
)
from kvasir.scaling.ledger import Price

# Statuses of a request that may succeed another time.
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
TOP = 20  # Alternatives to ask for at each token; servers give no more.
TEMPLATE_TOKENS = 32  # Tokens that the template may add to a message's text.


class HTTPEndpoint(Endpoint):
    """A model behind a URL.

    ``url``: up to and including ``/v1``. ``logprobs``: ask for them (some hosted models refuse).
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        name: str = "",
        price: Price | None = None,
        api_key: str = "",
        logprobs: bool = True,
        timeout: float = 600.0,
        most_requests: int = 64,
    ) -> None:
        try:
            import httpx
        except ImportError as e:
            raise ConfigError("a model behind a URL needs httpx: pip install httpx") from e
        if not url.startswith(("http://", "https://")) or not model:
            raise ConfigError(f"'{url}#{model}': a remote model is URL#NAME, for example http://127.0.0.1:8000/v1#base")
        self.url, self.model, self.name, self.price = url.rstrip("/"), model, name or model, price or Price()
        self.caps = Caps(logprobs=logprobs, choose=logprobs, schema=True)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout, self._httpx = timeout, httpx
        self._limits = httpx.Limits(max_connections=most_requests)
        self.client: Any = None

    async def start(self) -> None:
        self.client = self._httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=self._limits)
        try:
            listed = await self.client.get(f"{self.url}/models")
            listed.raise_for_status()
        except self._httpx.HTTPError as e:
            raise ConfigError(f"no OpenAI-compatible server answers at {self.url}: {e or type(e).__name__}") from e

    async def close(self) -> None:
        if self.client is not None:
            await self.client.aclose()

    def most_prompt_tokens(self, prompt: Prompt) -> int:
        return sum(len(str(m.get("content", "")).encode()) + TEMPLATE_TOKENS for m in prompt.messages)

    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        if prompt.begun or sampling.stop:
            raise Refused(f"{self.name} cannot continue a reply")
        if sampling.shape is not None and sampling.shape.mark:
            raise Refused(f"{self.name} cannot force text")
        return HTTPDraw(self, prompt, n, sampling, seed)

    def body(self, prompt: Prompt, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The JSON body of a request."""
        extra = {"logprobs": True, "top_logprobs": TOP} if self.caps.logprobs else {}
        return {
            "model": self.model,
            "messages": list(prompt.messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed completion. Raises Refused for a faulty request, EndpointError for all else."""
        try:
            async with self.client.stream("POST", f"{self.url}/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")[:300]
                    if reply.status_code in RETRIED:
                        after = reply.headers.get("retry-after", "")
                        raise EndpointError(f"{reply.status_code}: {text}", float(after) if after.isdigit() else None)
                    raise Refused(f"{reply.status_code}: {text}")
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise EndpointError(f"the stream broke off: {str(chunk['error'])[:300]}")
                        yield chunk
        except (self._httpx.HTTPError, json.JSONDecodeError) as e:
            raise EndpointError(f"{type(e).__name__}: {e}") from e

    async def choose(self, prompt: Prompt, options: Sequence[str], usage: Usage) -> dict[str, float]:
        """Choose by the likeliest alternatives of the next token.

        An option that is not among them gets the value of the last one, which is an upper bound.
        """
        top: dict[str, float] = {}
        async for chunk in self.stream(self.body(prompt, 1, 1.0, 0)):
            _count(usage, chunk)
            for choice in chunk.get("choices", []):
                for entry in ((choice.get("logprobs") or {}).get("content") or [])[:1]:
                    top = {t["token"].strip(): t["logprob"] for t in reversed(entry["top_logprobs"])}
        if not any(o in top for o in options):
            raise Refused(f"none of {', '.join(options)} is among the likeliest next tokens of {self.name}")
        floor = min(top.values())
        from math import exp, log

        found = {o: top.get(o, floor) for o in options}
        total = log(sum(map(exp, found.values())))
        return {o: p - total for o, p in found.items()}


def _count(usage: Usage, chunk: dict[str, Any]) -> bool:
    """Add a chunk's usage to ``usage``. Returns whether the chunk had one."""
    found = chunk.get("usage")
    if not found:
        return False
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    usage.cached += cached
    usage.uncached += found.get("prompt_tokens", 0) - cached
    return True


class HTTPDraw(Draw):
    """The requests of one call, one for each sample."""

    def __init__(self, endpoint: HTTPEndpoint, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> None:
        super().__init__()
        self.endpoint, self.prompt, self.n, self.sampling, self.seed = endpoint, prompt, n, sampling, seed
        self._chunks: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task] = []

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        self._tasks = [asyncio.create_task(self._follow(i)) for i in range(self.n)]
        left = self.n
        while left:
            chunk = await self._chunks.get()
            if isinstance(chunk, BaseException):
                raise chunk
            left -= chunk.finish is not None
            yield chunk

    async def cancel(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self._tasks[index].cancel()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, index: int) -> None:
        """Run one sample. Closing the connection cancels it at the server."""
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1
        body = self.endpoint.body(self.prompt, self.sampling.max_tokens, self.sampling.temperature, seed)
        if self.sampling.shape is not None:
            schema = {"name": "reply", "schema": json.loads(self.sampling.shape.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        finish, counted, made = None, False, 0
        try:
            async for chunk in self.endpoint.stream(body):
                if _count(self.usage, chunk):
                    counted = True
                    # The server's own count includes the end mark.
                    rest = chunk["usage"].get("completion_tokens", made) - made
                    if rest > 0:
                        self._chunks.put_nowait(Chunk(index, count=rest))
                for choice in chunk.get("choices", []):
                    if (piece := self._piece(index, choice)) is not None:
                        made += piece.count
                        self._chunks.put_nowait(piece)
                    finish = choice.get("finish_reason") or finish
            if finish is None:
                raise EndpointError("the stream ended without a finish_reason")
            self._chunks.put_nowait(Chunk(index, count=0, finish="length" if finish == "length" else "stop"))
        except asyncio.CancelledError:
            self._chunks.put_nowait(Chunk(index, count=0, finish="cancelled"))
            raise
        except Exception as e:  # raised where the draw is iterated
            self._chunks.put_nowait(e)
        finally:
            if not counted:
                self.usage.uncached += self.endpoint.most_prompt_tokens(self.prompt)

    @staticmethod
    def _piece(index: int, choice: dict[str, Any]) -> Chunk | None:
        text = (choice.get("delta") or {}).get("content") or ""
        entries = (choice.get("logprobs") or {}).get("content") or []
        if not entries:
            return Chunk(index, text) if text else None
        confidences = [
            confidence_of([t["logprob"] for t in e["top_logprobs"]]) for e in entries if e.get("top_logprobs")
        ]
        return Chunk(index, text, logprobs=[e["logprob"] for e in entries], confidences=confidences, count=len(entries))
