"""``kvasir chat``: a conversation in the terminal, with a model in this process or with a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


def run(config: EngineConfig, *, system: str | None, url: str | None, temperature: float, max_tokens: int | None) -> None:
    from rich.console import Console

    console = Console()
    answer = _from_server(url) if url else _in_process(config)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    console.print("[dim]Write a message and press Enter. /new starts again, Ctrl-D ends.[/dim]")
    while True:
        try:
            text = console.input("[bold cyan]you[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            continue
        if text == "/new":
            messages = messages[:1] if system else []
            continue
        messages.append({"role": "user", "content": text})
        parts = []
        try:
            for piece in answer(messages, temperature, max_tokens):
                parts.append(piece)
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            pass  # keep what was said so far, as a browser's stop button does
        console.print()
        messages.append({"role": "assistant", "content": "".join(parts)})


def _in_process(config: EngineConfig):
    from kvasir.api.llm import LLM

    llm = LLM(config=config)

    def answer(messages: list[dict[str, str]], temperature: float, max_tokens: int | None) -> Iterator[str]:
        ids = llm.tokenizer.encode_chat(messages)
        yield from llm.stream({"prompt_token_ids": ids}, llm.default_sampling_params(temperature=temperature, max_tokens=max_tokens))

    return answer


def _from_server(url: str):
    def answer(messages: list[dict[str, str]], temperature: float, max_tokens: int | None) -> Iterator[str]:
        body: dict[str, Any] = {"model": _model(url), "messages": messages, "temperature": temperature, "stream": True}
        if max_tokens:
            body["max_tokens"] = max_tokens
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with _open(request) as reply:
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    for choice in json.loads(line[6:]).get("choices", []):
                        yield choice["delta"].get("content") or ""

    return answer


def _model(url: str) -> str:
    with _open(urllib.request.Request(f"{url.rstrip('/')}/v1/models")) as reply:
        return json.load(reply)["data"][0]["id"]


def _open(request: urllib.request.Request):
    try:
        return urllib.request.urlopen(request, timeout=600)
    except urllib.error.HTTPError as e:
        raise ConfigError(f"the server answered {e.code}: {e.read().decode(errors='replace')[:500]}") from e
    except urllib.error.URLError as e:
        raise ConfigError(f"no server answers at {request.full_url}: {e.reason}. Start one with `kvasir serve`.") from e
