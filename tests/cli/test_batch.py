"""``kvasir generate -i`` on files in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import pytest

from kvasir.cli import batch

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EXACT = {"temperature": 0, "max_tokens": 6}


def line(name, url=TEXT, body=None, **more) -> dict:
    return {"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": "Once", **EXACT}, **more}


def write(path, lines) -> str:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return str(path)


def rows(path) -> dict:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert all(list(row) == ["id", "custom_id", "response", "error"] for row in found)
    assert len({row["id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


GOOD = [
    line("chat", CHAT, {"messages": [{"role": "user", "content": "hello\u2028you"}], **EXACT}),
    line("text", TEXT, {"model": "nano", "prompt": "Once upon a time", **EXACT}),
    line("response", RESPONSES, {"input": "hello", "temperature": 0, "max_output_tokens": 6}),
    line("two", TEXT, {"prompt": "the king", "n": 2, "logprobs": 1, **EXACT}),
]
BAD = [  # line, custom_id of its row, status (None: it was not sent), part of the message
    ("not json", None, None, "is not JSON"),
    ("[1]", None, None, "not a JSON object"),
    ("[" * 100_000, None, None, "is not JSON"),
    (line(""), None, None, "custom_id must be text"),
    (line(5), None, None, "custom_id must be text"),
    (line("method", method="GET"), "method", None, "method must be POST"),
    (line("no-url", None), "no-url", None, "url must name a route"),
    (line("url", "/v1/chat/completion"), "url", None, "Did you mean '/v1/chat/completions'?"),
    (line("runs", "/v1/scaling/runs"), "runs", None, "is not served"),
    (line("body", body=[1]), "body", None, "body must be a JSON object"),
    (line("stream", body={"prompt": "x", "stream": True}), "stream", None, "cannot stream"),
    (line("background", RESPONSES, {"input": "x", "background": True}), "background", None, "waits for answers"),
    (line("more", extra=1), "more", None, "holds more than"),
    (line("text"), "text", None, "used by an earlier line"),
    (line("model", body={"model": "gpt-4o", "prompt": "x"}), "model", 404, "is not served here"),
    (line("value", body={"prompt": "x", "temperature": -1}), "value", 400, "temperature"),
    (line("nan", body={"prompt": "x", "temperature": float("nan")}), "nan", 400, "not valid JSON"),
    (line("surrogate", body={"prompt": "\ud800"}), "surrogate", 400, "not valid JSON"),
]


def test_a_batch_is_found_by_its_content():
    assert batch.is_batch("\n" + json.dumps(GOOD[0]) + "\nrest")
    for other in ("", "Once upon", "[" * 100_000, '{"prompt": "x"}', '{"custom_id": "a", "prompt": "x"}', "[1]", "5"):
        assert not batch.is_batch(other)


def test_good_lines_are_answered_as_the_server_would_and_bad_ones_go_to_the_errors(kvasir, tmp_path):
    source, output, errors = tmp_path / "in", tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    write(source, [GOOD[0], "", *GOOD[1:], *(bad for bad, *_ in BAD)])
    done = kvasir("generate", "nano", "-i", source, "-o", output, "--errors", errors)
    assert done.code == 3 and done.out == "" and f"{len(BAD)} of {len(BAD) + len(GOOD)} lines failed" in done.err
    found = rows(output)
    assert set(found) == {"chat", "text", "response", "two"}
    bodies = {name: row["response"]["body"] for name, row in found.items()}
    assert all(r["response"]["status_code"] == 200 and r["response"]["request_id"] for r in found.values())
    assert bodies["chat"]["object"] == "chat.completion" and bodies["response"]["object"] == "response"
    assert len(bodies["two"]["choices"]) == 2 and bodies["two"]["choices"][0]["logprobs"]
    own = json.dumps({"prompt": "Once upon a time", **EXACT})
    direct = json.loads(kvasir("generate", "nano", "-i", "-", "--jsonl", stdin=own).out)
    assert direct["outputs"][0]["text"] == bodies["text"]["choices"][0]["text"]
    faults = [json.loads(each) for each in errors.read_text().splitlines()]
    assert len(faults) == len(BAD)
    for _, name, status, message in BAD:
        mine = [f for f in faults if f["custom_id"] == name]
        if status is None:
            assert any(f["response"] is None and message in f["error"]["message"] for f in mine), name
        else:
            [f] = mine
            assert f["error"] is None and f["response"]["status_code"] == status
            assert message in f["response"]["body"]["error"]["message"]


def test_a_second_run_answers_what_is_left(kvasir, tmp_path, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = line("bad", body={"prompt": "x", "temperature": -1})
    write(source, [GOOD[1], bad])
    assert kvasir("generate", "nano", "-i", source, "-o", output).code == 3
    first = rows(output)
    assert set(first) == {"text", "bad"} and first["bad"]["response"]["status_code"] == 400
    with output.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "two", "torn')
    write(source, [GOOD[1], line("bad"), *GOOD[2:]])
    done = kvasir("generate", "nano", "-i", source, "-o", output)
    assert done.code == 0 and "1 of 4 lines are answered in" in done.err
    again = rows(output)
    assert set(again) == {"text", "bad", "response", "two"} and again["text"] == first["text"]
    assert all(row["response"]["status_code"] == 200 for row in again.values())
    before = output.read_bytes()
    monkeypatch.setattr(batch, "serving", lambda *settings: pytest.fail("no engine is needed"))
    done = kvasir("generate", "nano", "-i", source, "-o", output)
    assert done.code == 0 and "4 of 4 lines" in done.err and output.read_bytes() == before


def test_what_is_no_output_of_a_batch_is_left_alone(kvasir, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, GOOD)
    output.write_text('{"index": 0, "outputs": []}\n')
    done = kvasir("generate", "nano", "-i", source, "-o", output)
    assert done.code == 2 and "is no output of a batch" in done.err and output.read_text().startswith('{"index"')
    for more, message in (
        (("--temperature", "0"), "has its own parameters"),
        (("--chat",), "has its own parameters"),
        (("--errors", str(source)), "errors would overwrite the requests"),
        (("-o", str(source)), "results would overwrite"),
    ):
        done = kvasir("generate", "nano", "-i", source, *more)
        assert done.code == 2 and message in " ".join(done.err.split()), done.err
    done = kvasir("generate", "nano", "-p", "x", "--errors", tmp_path / "e")
    assert done.code == 2 and "batch format" in done.err
    assert json.loads(source.read_text().splitlines()[0]) == GOOD[0]


def test_what_is_done_survives_an_interrupt(kvasir, tmp_path, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
    write(source, [line("short"), line("long", body=long)])
    add = batch.Outcome.add

    def interrupt(self, fault):
        add(self, fault)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(batch.Outcome, "add", interrupt)
    done = kvasir("generate", "nano", "-i", source, "-o", output)
    assert done.code == 130 and f"1 of 2 lines were written to {output}" in done.err
    assert set(rows(output)) == {"short"}


def test_a_full_queue_is_waited_for():
    """The app answers 429 and 503 twice each before the answer."""
    statuses = [429, 503, 429, 503, 200]

    async def app(scope, receive, send):
        assert scope["path"] == TEXT and (await receive())["body"] == b'{"prompt": "x"}'
        status = statuses.pop(0)
        body = b"{}" if status == 200 else b'{"error": {"code": "queue_full", "message": "full"}}'
        headers = [(b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    row, fault = asyncio.run(batch._answer(app, batch.Line("a", TEXT, b'{"prompt": "x"}'), [TEXT]))
    assert not fault and row["response"]["body"] == {} and not statuses


def test_a_batch_is_cut(kvasir, tmp_path):
    asked = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", [line("long", body=asked), line("short", body=asked | {"max_tokens": 2})])
    output = tmp_path / "out.jsonl"
    done = kvasir("generate", "nano", "-i", source, "-o", str(output), "--max-output-tokens", "4")
    assert done.code == 0, done.err
    used = {name: row["response"]["body"] for name, row in rows(output).items()}
    assert used["long"]["usage"]["completion_tokens"] == 4
    assert used["long"]["choices"][0]["finish_reason"] == "length"
    assert used["short"]["usage"]["completion_tokens"] == 2
    done = kvasir("generate", "nano", "-p", "Once", "--max-output-tokens", "4")
    assert done.code == 2 and "--max-tokens" in done.err
