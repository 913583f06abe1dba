"""Loading and unloading of LoRA adapters over HTTP, as vLLM has it. Only with ``--allow-runtime-lora``."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvasir.api.http import limits
from kvasir.api.http.body import Body, parse
from kvasir.api.http.service import Service


class LoadAdapterBody(Body):
    """Body of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterBody(Body):
    """Body of /v1/unload_lora_adapter. vLLM's clients may send the adapter's number, which means nothing here."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None


class AdapterRoutes:
    """The two routes of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def load(self, http: Request) -> Response:
        """Load an adapter from a folder on the server. 200 once requests may name it."""
        raw = await self.service.body(http)
        body, _ = parse(LoadAdapterBody, limits.decode_json(raw), self.service.settings.lenient)
        await self.service.client.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: Request) -> Response:
        """Unload an adapter. New requests of it are refused at once; 200 once those in progress have ended."""
        raw = await self.service.body(http)
        body, _ = parse(UnloadAdapterBody, limits.decode_json(raw), self.service.settings.lenient)
        await self.service.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
