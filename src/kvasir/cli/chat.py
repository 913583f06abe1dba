"""``kvasir chat``: a conversation in the terminal, with a model in this process or with a running server."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvasir.cli.generate import NAMES
from kvasir.cli.starting import packaged
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError, nearest
from kvasir.progress import loading
from kvasir.records import replace

# Seconds of silence after which a server counts as gone.
SECONDS = 600.0
# Maps a conversation and its sampling parameters to the pieces of the model's answer.
Answer = Callable[[list[dict[str, str]], dict[str, Any]], Iterator[str]]
COMMANDS = {
    "/new": "start over; the system prompt and the parameters stay",
    "/params": "show the sampling parameters; /params temperature=0 max_tokens=200 sets some, /params seed= unsets one",
    "/save": "write the conversation to a file that `kvasir generate -i` and the API take; /save FILE.jsonl names it",
    "/help": "list the commands",
}
# A word of one slash and letters is a command; any other text, say a path, is a message.
COMMAND = re.compile(r"/[A-Za-z?]+")


def run(
    config: EngineConfig, *, system: str | None, url: str | None, api_key: str | None, sampling: dict[str, Any]
) -> None:
    """Hold a conversation with the server at ``url``, or with an engine in this process if ``url`` is None."""
    from rich.console import Console

    console = Console()
    with contextlib.ExitStack() as stack:
        if url:
            answer = _from_server(url.rstrip("/"), api_key)
        else:
            if note := packaged(config.model.model, "kvasir chat"):
                console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
            with loading(config.model.model):
                answer = _in_process(config, stack)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  editing and history at the prompt, where Python was built with it
        Conversation(console, answer, [{"role": "system", "content": system}] if system else [], sampling).hold()


class Conversation:
    """The messages so far, and the parameters of the next answer. ``opening``: messages that /new keeps."""

    def __init__(
        self, console: Any, answer: Answer, opening: list[dict[str, str]], sampling: dict[str, Any] | None = None
    ) -> None:
        self.console, self.answer, self.opening = console, answer, opening
        self.sampling = dict(sampling or {})
        self.messages = list(opening)

    def hold(self) -> None:
        """Read messages and commands until the end of stdin."""
        self.say("Write a message and press Enter. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", "dim")
        while True:
            try:
                text = self.console.input("[bold cyan]you[/bold cyan] ").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            word, _, rest = text.partition(" ")
            if COMMAND.fullmatch(word):
                self.obey(word, rest.strip())
            elif text:
                self.send(text)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def send(self, text: str) -> None:
        """Send a message and show the answer. A refused message is removed, and the conversation continues."""
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            for piece in self.answer(self.messages, self.sampling):
                parts.append(piece)
                self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            self.console.print()
        except KeyboardInterrupt:
            self.console.print()  # keep the answer so far, as a browser's stop button does
        except RequestError as e:
            self.say(f"refused: {e.message}", "red")
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    def obey(self, command: str, rest: str) -> None:
        """Do what a command says; an unknown one is answered with those that exist."""
        if command == "/new":
            self.messages = list(self.opening)
        elif command == "/params":
            self.set_parameters(rest)
        elif command == "/save":
            self.save(rest)
        elif command in ("/help", "/?"):
            for name, text in COMMANDS.items():
                self.say(f"{name:8} {text}")
        else:
            self.say(f"no command {command}.{nearest(command, COMMANDS)} /help lists all.", "red")

    def set_parameters(self, text: str) -> None:
        """Set the parameters that ``text`` names, or none of them if one is wrong, and show all."""
        changed = dict(self.sampling)
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals or name not in NAMES:
                hint = nearest(name, NAMES) or " Write name=value, e.g. temperature=0."
                self.say(f"no parameter '{pair}'.{hint}", "red")
                return
            if not value:
                changed.pop(name, None)
                continue
            try:
                changed[name] = json.loads(value)
            except json.JSONDecodeError:
                changed[name] = value  # a word: stop=END, drafter=ngram
        self.sampling = changed
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())
        self.say(shown or "no parameters are set: the model's own defaults hold")

    def save(self, name: str) -> None:
        """Write the conversation as one JSON line. An existing file is left as it is."""
        file = Path(name or time.strftime("kvasir-chat-%Y%m%d-%H%M%S.jsonl")).expanduser()
        try:
            if file.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            line = json.dumps({"messages": self.messages, **self.sampling}, ensure_ascii=False)
            replace(file, line.encode(errors="backslashreplace") + b"\n")
            self.say(f"saved {len(self.messages)} messages to {file}", "dim")
        except OSError as e:
            self.say(f"cannot write {file}: {e.strerror}. Name another file: /save FILE.jsonl", "red")


def _in_process(config: EngineConfig, stack: contextlib.ExitStack) -> Answer:
    from kvasir.api.offline.llm import LLM

    llm = stack.enter_context(LLM(config=config))
    if llm.tokenizer is None:
        raise ConfigError("a chat needs the tokenizer: drop --skip-tokenizer-init")

    def answer(messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        try:
            params = llm.default_sampling_params(**{"max_tokens": None, **sampling})
        except (TypeError, ValueError) as e:
            raise RequestError(f"bad sampling parameters: {e}") from e
        return llm.stream({"prompt_token_ids": llm.tokenizer.encode_chat(messages)}, params)

    return answer


def _from_server(url: str, api_key: str | None) -> Answer:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    with _open(f"{url}/v1/models", headers) as reply:
        try:
            model = json.load(reply)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as e:
            raise ConfigError(
                f"the server at {url} does not answer with a list of models as the OpenAI API does"
            ) from e

    def answer(messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
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
