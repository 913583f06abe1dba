"""Stand-in for vLLM's server: it streams completions at a fixed pace, one token an event."""

import argparse
import asyncio
import json

import uvicorn
import uvloop  # the real server does, too; ``peers.vllm_server`` replaces it where it is not installed

from vllm import note

GAP = 0.002


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    if scope["path"] == "/health":
        return await reply(send, b"")
    if scope["path"] == "/v1/models":
        return await reply(send, json.dumps({"data": [{"id": args.served_model_name or "m"}]}).encode())
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body")
    asked = json.loads(body)
    note(op="request", prompt=asked["prompt"], count=asked["max_tokens"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(asked["max_tokens"]):
        await asyncio.sleep(GAP)
        await event(send, {"choices": [{"index": 0, "text": "t"}], "usage": None})
    await event(
        send,
        {
            "choices": [],
            "usage": {"completion_tokens": asked["max_tokens"], "prompt_tokens_details": {"cached_tokens": 1}},
        },
    )
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def event(send, value):
    await send({"type": "http.response.body", "body": f"data: {json.dumps(value)}\n\n".encode(), "more_body": True})


async def reply(send, body):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--load-format", "--served-model-name", "--max-model-len", "--tokenizer"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    for flag in ("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"):
        parser.add_argument(flag, action="store_true", required=True)
    args = parser.parse_args()
    note(op="serve", options=vars(args))
    uvloop.run(uvicorn.Server(uvicorn.Config(app, host=args.host, port=args.port, log_level="warning")).serve())
