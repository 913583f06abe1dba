"""Run `make demo`: start the server with the packaged model, talk to it through the official openai client, stop it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI
from rich.console import Console

from kvasir.progress import loading

PROBLEM = "Compute modulo 97: start 12; +45; *3; -7; *2; +30."


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    for _ in range(1200):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise SystemExit("the server was not ready within a minute")


def talk(client: OpenAI, console: Console) -> None:
    model = client.models.list().data[0].id
    console.rule("chat")
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROBLEM}], temperature=0, max_tokens=200
    )
    console.print(PROBLEM, style="cyan")
    console.print(answer.choices[0].message.content, markup=False)

    console.rule("streamed chat")
    started, first, count = time.perf_counter(), None, 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story about a king."}],
        temperature=0.7,
        seed=7,
        max_tokens=160,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            count = chunk.usage.completion_tokens
    seconds = time.perf_counter() - started
    console.print(
        f"\n[green]{count} tokens, first after {1000 * ((first or started) - started):.0f} ms, "
        f"{count / seconds:,.0f} tokens/s[/green]"
    )

    console.rule("completion with log-probabilities")
    done = client.completions.create(
        model=model, prompt="Once upon a time there was a", max_tokens=8, temperature=0, logprobs=2
    )
    for token, logprob in zip(done.choices[0].logprobs.tokens, done.choices[0].logprobs.token_logprobs):
        console.print(f"  {token!r:16} {logprob:8.3f}", markup=False)

    console.rule("JSON schema")
    properties = {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["king", "fox", "witch"]},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe somebody in a fairy tale as JSON."}],
        temperature=0.8,
        seed=3,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    console.print_json(json.dumps(json.loads(reply.choices[0].message.content)))


def main() -> None:
    console = Console()
    port = free_port()
    started = time.perf_counter()
    server = subprocess.Popen([sys.executable, "-m", "kvasir.cli.main", "serve", "--port", str(port)])
    try:
        with loading("the packaged model in a server"):
            wait_until_ready(server, port)
        console.print(f"[green]ready {time.perf_counter() - started:.1f} s after the start of the process[/green]")
        talk(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"), console)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    console.print(
        f"[green]stopped cleanly[/green] (code {code})"
        if code == 0
        else f"[red]the server ended with code {code}[/red]"
    )
    raise SystemExit(code)


if __name__ == "__main__":
    main()
