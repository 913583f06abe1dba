"""The small routes: health, models, metrics, tokenize and detokenize."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvasir import __version__
from kvasir.api.calls import tools
from kvasir.api.http import metrics
from kvasir.api.http.body import Body
from kvasir.api.http.errors import error_response
from kvasir.api.http.service import Caller, Service
from kvasir.api.http.streaming import encode
from kvasir.api.protocols.openai import MAX_MESSAGES, Message, Object
from kvasir.api.protocols.routes_chat import template_options
from kvasir.api.text.chat import check_messages, texts
from kvasir.errors import RequestError
from kvasir.types import AdapterInfo

# Most tokens that /detokenize takes.
MAX_DETOKENIZE = 1 << 20
# /tokenize takes texts of up to this many contexts.
TOKENIZE_FACTOR = 4


class TokenizeBody(Body):
    """Body of /tokenize, with either ``prompt`` or ``messages``."""

    prompt: str | None = None
    parse_special: bool | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]


def reply(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


class StatusRoutes:
    """The small routes of a service; each public method is one."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.created = int(time.time())

    async def live(self) -> Response:
        """200 as soon as the port is bound;
        503 only when the engine was given up and the server has to be restarted."""
        service = self.service
        if service.phase == "ready" and not (health := service.client.health()).live:
            return error_response(RequestError(health.reason or "the engine is down", status=503, code="engine_down"))
        return reply({"status": "ok"})

    async def ready(self) -> Response:
        """200 when requests are served; 503 with the reason and Retry-After otherwise."""
        if reason := self.service.not_ready():
            return error_response(RequestError(reason, status=503, code="not_ready", retry_after=1.0))
        return reply({"status": "ready", "model": self.service.info.name})

    async def health(self) -> Response:
        """200 with an empty body, or 503: ``ready`` under vLLM's name, without a key and without details."""
        if self.service.not_ready():
            return error_response(RequestError("not ready", status=503, code="not_ready", retry_after=1.0))
        return Response()

    async def version(self) -> Response:
        return reply({"version": __version__})

    async def models(self) -> Response:
        self.service.require_ready()
        models = [self._model(), *map(self._adapter, self.service.info.adapters.values())]
        # The second line is for Anthropic's clients.
        return reply(
            {"object": "list", "data": models}
            | {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        )

    async def hooks(self) -> Response:
        """The sets of hooks that requests may name."""
        self.service.require_ready()
        sets = [
            {"id": one.name, "object": "hook", "hooks": list(one.parts), "key": one.key}
            | {"from": "answer" if one.answers else "prompt", "changes_kv": one.changes_kv}
            for one in self.service.info.hooks.values()
        ]
        return reply({"object": "list", "data": sets})

    async def model(self, name: str) -> Response:
        self.service.require_ready()
        if name.endswith("/") or not name:
            served = f"/v1/models/{name.rstrip('/')}".rstrip("/")
            raise RequestError(
                f"the path ends in a slash: leave that away. The route is GET {served[:120]}.",
                status=404,
                code="not_found",
            )
        if (adapter := self.service.info.adapters.get(name)) is not None:
            return reply(self._adapter(adapter))
        if name not in (self.service.info.name, *self.service.settings.model_alias):
            raise RequestError(
                f"the model '{name[:200]}' is not served here", status=404, param="model", code="model_not_found"
            )
        return reply(self._model())

    def _model(self) -> dict[str, Any]:
        info = self.service.info
        return {
            "id": info.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvasir",
            "root": info.name,
            "parent": None,
            "max_model_len": info.max_model_len,
            "packaged": info.packaged,  # the playground says so
            "type": "model",  # this and the rest are what Anthropic's clients read
            "display_name": info.name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
        }

    def _adapter(self, adapter: AdapterInfo) -> dict[str, Any]:
        """An adapter as vLLM lists it: ``root`` is its folder and ``parent`` the base model."""
        own = {"id": adapter.name, "root": adapter.path, "parent": self.service.info.name, "max_model_len": None}
        return self._model() | own

    async def metrics(self) -> Response:
        started = hasattr(self.service.client, "info")  # missing before the start and after one that was cancelled
        stats, name = (self.service.client.stats(), self.service.info.name) if started else (None, "")
        return Response(self.service.metrics.render(stats, name), headers={"content-type": metrics.CONTENT_TYPE})

    async def tokenizer_info(self) -> Response:
        """The tokenizer's configuration, as vLLM gives it: class, special tokens as texts, chat template."""
        self.service.require_ready()
        tokenizer = self.service.text.tokenizer
        templates = {name: template.source for name, template in tokenizer.templates.items()}
        return reply(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **tokenizer.config,
                **tokenizer.named_tokens,
                "chat_template": templates.get("default"),
            }
        )

    async def tokenize(self, http: Request) -> Response:
        caller = Caller(http)
        raw = await self.service.body(http)
        return await self.service.prepare(caller, raw, self._tokenize, raw, caller)

    def _tokenize(self, raw: bytes, caller: Caller) -> Response:
        body, _ = self.service.parse(TokenizeBody, raw, adapters=True)
        tokenizer = self.service.text.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either 'prompt' or 'messages'", param="prompt")
        length = self.service.info.max_model_len
        check = partial(self.service.text.check_size, max_model_len=length, contexts=TOKENIZE_FACTOR)
        check([body.prompt or "", *texts(body.messages or [])])
        tools.validate(body.tools)
        if body.messages is None:
            ids = tokenizer.prompt_ids(body.prompt or "", body.parse_special, body.add_special_tokens)
        else:
            caller.render(tokenizer, None, body.tools)
            ids = tokenizer.encode_chat(
                check_messages(body.messages),
                tools=body.tools or None,
                add_generation_prompt=body.add_generation_prompt is not False,
                check=check,
                **template_options(self.service, body.chat_template_kwargs),
            )
        strings = [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        return reply(
            {"count": len(ids), "max_model_len": self.service.info.max_model_len, "tokens": ids, "token_strs": strings}
        )

    async def detokenize(self, http: Request) -> Response:
        caller = Caller(http)
        raw = await self.service.body(http)
        return await self.service.prepare(caller, raw, self._detokenize, raw)

    def _detokenize(self, raw: bytes) -> Response:
        body, _ = self.service.parse(DetokenizeBody, raw, adapters=True)
        size = self.service.text.tokenizer.size
        if len(body.tokens) > MAX_DETOKENIZE:
            raise RequestError(f"at most {MAX_DETOKENIZE} tokens", param="tokens")
        if any(not 0 <= i < size for i in body.tokens):
            raise RequestError(f"token ids are 0 to {size - 1}", param="tokens")
        return reply({"prompt": self.service.text.tokenizer.decode(body.tokens, skip_special=False)})
