"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors of texts, and how well documents answer a query.

A reranker reads a query and a document as one prompt. An embedding model scores a pair by the cosine of two vectors,
as vLLM does, and reads each text once.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kvasir.api.http.limits import unique_id
from kvasir.api.http.service import Caller, Service
from kvasir.api.http.streaming import encode
from kvasir.api.protocols.pooling_work import PoolingWork
from kvasir.api.protocols.protocol_pooling import EmbeddingsBody, PoolingBody, RerankBody, ScoreBody
from kvasir.api.text.pooling import PoolingText, cosine, paired, vector
from kvasir.client.admission import admit_pooling
from kvasir.errors import RequestError
from kvasir.types import Event, PoolingParams

B = TypeVar("B", bound=PoolingBody)


class PoolingJob:
    """Base class of the jobs here; see ``service.Job``. Nothing is streamed."""

    stream = False
    prefix = "embd"  # how ids of replies begin

    def __init__(self, service: Service, body: PoolingBody, ignored: list[str], caller: Caller) -> None:
        self.service, self.body, self.ignored, self.caller = service, body, ignored, caller
        self.names: dict[str, str] = {}
        self.text = PoolingText(service.text.tokenizer, service.info)
        self.id = unique_id(self.prefix, caller.id)

    def most(self) -> int | None:
        """Tokens to which prompts are shortened; None: longer ones are refused. Raises RequestError."""
        given, longest = self.body.truncate_prompt_tokens, self.service.info.max_model_len
        if given is None or given == -1:
            return None if given is None else longest
        if not 1 <= given <= longest:
            raise RequestError(
                f"truncate_prompt_tokens={given} is out of range: 1 to {longest}, or -1 for the whole context",
                param="truncate_prompt_tokens",
            )
        return given

    def encode(self, param: str, texts: Iterable[Any], make: Callable[[Any], list[int]]) -> list[list[int]]:
        """Token ids of every text or pair. Errors name ``param`` and the place. Raises RequestError."""
        found = []
        for i, text in enumerate(texts):
            try:
                strings = [text] if isinstance(text, str) else [t for t in text if isinstance(t, str)]
                if self.body.truncate_prompt_tokens is None:
                    self.service.text.check_size(strings, self.service.info.max_model_len)
                found.append(make(text))
            except RequestError as e:
                if e.param == "prompt":
                    e.param, e.message = param, f"{param}[{i}]: {e.message}"
                raise
        return found

    def admit(self, param: str, prompts: list[list[int]], params: PoolingParams) -> None:
        """Make the engine requests. Raises RequestError that names ``param`` and the place."""
        self.names = {"prompt": param}
        self.requests = []
        for i, ids in enumerate(prompts):
            try:
                request = admit_pooling(
                    ids,
                    params,
                    self.service.info,
                    id=f"{self.id}.{i}",
                    arrival=self.caller.arrival,
                    tenant=self.caller.tenant,
                    priority=self.body.priority or 0,
                )
            except RequestError as e:
                if e.param == "prompt":
                    e.param, e.message = param, f"{param}[{i}]: {e.message}"
                raise
            self.requests.append(request)
        self.service.check_queue(self.requests, param)

    def begin(self, release: Callable[[], None]) -> PoolingWork:
        return PoolingWork(self.service.client, self.service.metrics, self.requests, release)

    def usage(self, work: PoolingWork) -> dict[str, Any]:
        count = sum(len(request.prompt_ids) for request in self.requests)
        details = {"cached_tokens": work.cached}
        return {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": details}

    async def events(self, work: PoolingWork) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError("nothing is streamed")
        yield b""


class EmbeddingsJob(PoolingJob):
    """A body of /v1/embeddings. The constructor admits it, off the event loop. Raises RequestError."""

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        body, ignored = service.parse(EmbeddingsBody, raw)
        super().__init__(service, body, ignored, caller)
        self.as_text = body.encoding_format == "base64"
        if body.normalize is not None and body.use_activation is not None:
            raise RequestError("'normalize' and 'use_activation' are the same: send one", param="normalize")
        if not isinstance(body.input[0], str) and (body.prompt_name or body.input_type):
            param = "prompt_name" if body.prompt_name else "input_type"
            raise RequestError("a prompt goes before text; it cannot go before token ids", param=param)
        prompt = self.text.prompt(body.prompt_name, body.input_type) if isinstance(body.input[0], str) else ""
        most = self.most()
        read = body.parse_special is not False, body.add_special_tokens is not False
        prompts = self.encode("input", body.input, lambda text: self.text.ids(text, prompt, most, *read))
        scaled = body.use_activation if body.normalize is None else body.normalize
        self.admit("input", prompts, PoolingParams(dimensions=body.dimensions, use_activation=scaled))

    async def result(self, work: PoolingWork) -> dict[str, Any]:
        # Off the event loop, one vector at a time: millions of numbers take seconds, in which other replies go on.
        data = await asyncio.to_thread(self._data, await work.vectors())
        head = {"id": self.id, "object": "list", "created": self.caller.created, "model": self.service.info.name}
        return {**head, "data": data, "usage": self.usage(work)}

    def _data(self, events: list[Event]) -> list[dict[str, Any]]:
        data = []
        for i, event in enumerate(events):
            found = base64.b64encode(event.pooled or b"").decode() if self.as_text else vector(event).tolist()
            data.append({"index": i, "object": "embedding", "embedding": msgspec.Raw(encode(found))})
        return data


class PairsJob(PoolingJob):
    """Base class of jobs that score pairs of texts."""

    def compare(
        self,
        first: list[str],
        second: list[str],
        pairs: list[tuple[int, int]],
        param: str,
        instruction: str | None,
        prompts: tuple[str, str] = ("", ""),
    ) -> None:
        """Admit what the scores of these pairs need. ``prompts``: what an embedding model reads before each of the two
        texts. Raises RequestError."""
        most, text = self.most(), self.text
        self.pairs, self.offset = pairs, len(first)
        params = PoolingParams(use_activation=self.body.use_activation)
        if text.pooling.task == "score":
            both = [(first[i], second[j]) for i, j in pairs]
            self.admit(param, self.encode(param, both, lambda p: text.pair_ids(*p, instruction, most)), params)
            return
        if instruction is not None:
            raise RequestError(
                "an embedding model reads no 'instruction'; write it into the query", param="instruction"
            )
        if self.body.use_activation is not None:
            raise RequestError("the cosine of two embeddings has no activation", param="use_activation")
        before = self.encode(param, first, lambda t: text.ids(t, prompts[0], most))
        self.admit(param, before + self.encode(param, second, lambda t: text.ids(t, prompts[1], most)), params)

    async def scores(self, work: PoolingWork) -> list[float]:
        """The score of each pair."""
        vectors = [vector(event) for event in await work.vectors()]
        if self.text.pooling.task == "score":
            return [float(v[0]) for v in vectors]
        return [cosine(vectors[i], vectors[self.offset + j]) for i, j in self.pairs]


class ScoreJob(PairsJob):
    """A body of /v1/score. The constructor admits it, off the event loop. Raises RequestError."""

    prefix = "score"

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        body, ignored = service.parse(ScoreBody, raw)
        super().__init__(service, body, ignored, caller)
        newer = body.queries is not None or body.documents is not None
        names = ("queries", "documents") if newer else ("text_1", "text_2")
        first, second = (getattr(body, name) for name in names)
        if first is None or second is None:
            missing = names[0] if first is None else names[1]
            raise RequestError(f"'{missing}' is required", param=missing, code="missing_parameter")
        if newer and (body.text_1 is not None or body.text_2 is not None):
            raise RequestError("send 'text_1' and 'text_2', or 'queries' and 'documents'", param="text_1")
        self.compare(first, second, paired(first, second, names), names[1], body.instruction)

    async def result(self, work: PoolingWork) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(await self.scores(work))]
        head = {"id": self.id, "object": "list", "created": self.caller.created, "model": self.service.info.name}
        return {**head, "data": data, "usage": self.usage(work)}


class RerankJob(PairsJob):
    """A body of /v1/rerank, which Jina's and Cohere's clients send to /rerank and /v2/rerank. The constructor admits
    it, off the event loop. Raises RequestError."""

    prefix = "rerank"

    def __init__(self, service: Service, raw: bytes, caller: Caller) -> None:
        body, ignored = service.parse(RerankBody, raw)
        super().__init__(service, body, ignored, caller)
        self.top_n, self.with_text = body.top_n or len(body.documents), body.return_documents is not False
        self.documents = body.documents
        read = self.encode("documents", body.documents, lambda t: self.text.cut(t, body.max_tokens_per_doc))
        named = self.text.pooling.prompts
        self.compare(
            [body.query],
            read,
            [(0, i) for i in range(len(read))],
            "documents",
            body.instruction,
            (named.get("query", ""), named.get("document", "")),
        )

    async def result(self, work: PoolingWork) -> dict[str, Any]:
        scores = await self.scores(work)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n]
        results = [
            {
                "index": i,
                **({"document": {"text": self.documents[i]}} if self.with_text else {}),
                "relevance_score": scores[i],
            }
            for i in best
        ]
        return {"id": self.id, "model": self.service.info.name, "results": results, "usage": self.usage(work)}
