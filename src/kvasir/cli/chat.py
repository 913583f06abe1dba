"""``kvasir chat``: a conversation in the terminal, with a model in this process or with a running server."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError

# Seconds of silence after which a server counts as gone.
SECONDS = 600.0
# Maps a conversation to the pieces of the model's answer.
Answer = Callable[[list[dict[str, str]]], Iterator[str]]


def run(
    config: EngineConfig, *, system: str | None, url: str | None, api_key: str | None, sampling: dict[str, Any]
) -> None:
    """Hold a conversation with the server at ``url``, or with an engine in this process if ``url`` is None."""
    from rich.console import Console

    console = Console()
    with contextlib.ExitStack() as stack:
        answer = _from_server(url.rstrip("/"), api_key, sampling) if url else _in_process(config, sampling, stack)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  editing and history at the prompt, where Python was built with it
        converse(console, answer, [{"role": "system", "content": system}] if system else [])


def converse(console: Any, answer: Answer, opening: list[dict[str, str]]) -> None:
    """Read messages until the end of stdin. A refused message is removed, and the conversation continues."""
    console.print("[dim]Write a message and press Enter. /new starts over, Ctrl-C stops an answer, Ctrl-D ends.[/dim]")
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold cyan]you[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/new":
            messages = list(opening)
        if not text or text == "/new":
            continue
        messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            for piece in answer(messages):
                parts.append(piece)
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            console.print()
        except KeyboardInterrupt:
            console.print()  # keep the answer so far, as a browser's stop button does
        except RequestError as e:
            console.print(f"refused: {e.message}", style="red", markup=False, highlight=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": "".join(parts)})


def _in_process(config: EngineConfig, sampling: dict[str, Any], stack: contextlib.ExitStack) -> Answer:
    from kvasir.api.llm import LLM

    llm = stack.enter_context(LLM(config=config))
    if llm.tokenizer is None:
        raise ConfigError("a chat needs the tokenizer: drop --skip-tokenizer-init")
    params = llm.default_sampling_params(**{"max_tokens": None, **sampling})

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        return llm.stream({"prompt_token_ids": llm.tokenizer.encode_chat(messages)}, params)

    return answer


def _from_server(url: str, api_key: str | None, sampling: dict[str, Any]) -> Answer:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    with _open(f"{url}/v1/models", headers) as reply:
        try:
            model = json.load(reply)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as e:
            raise ConfigError(
                f"the server at {url} does not answer with a list of models as the OpenAI API does"
            ) from e

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        with _open(f"{url}/v1/chat/completions", headers, body) as reply:
            try:
                yield from _deltas(reply)
            except (OSError, http.client.HTTPException) as e:
                raise RequestError(f"the connection broke off: {e}") from e

    return answer


def _deltas(lines: Any) -> Iterator[str]:
    """Yield the text pieces of a stream of server-sent events. Raises RequestError for an error event and when the
    stream has no end."""
    for line in lines:
        if line.startswith(b"data: [DONE]"):
            return
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RequestError(chunk["error"].get("message", "the server failed"))
        for choice in chunk.get("choices", []):
            yield choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""
    raise RequestError("the connection broke off")


def _open(url: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> Any:
    """Send a request. Raises RequestError when the server refuses it and ConfigError when no server answers."""
    try:
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as e:
        text = e.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = text[:500]
        raise RequestError(f"the server answered {e.code}: {text}") from e
    except (OSError, ValueError, http.client.HTTPException) as e:  # unknown host, no server, or not a URL
        raise ConfigError(
            f"no server answers at {url}: {getattr(e, 'reason', e)}. Start one with `kvasir serve`."
        ) from e
