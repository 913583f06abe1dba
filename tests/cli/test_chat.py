"""``kvasir chat``: a conversation on stdin, with a model in this process or with a server that misbehaves."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvasir.cli.chat import COMMANDS

END = "[DONE]"
PROBLEM, ANSWER = "Compute modulo 97: start 12; +45; *3; -7; *2; +30.", "Answer: 67"


def test_a_conversation_in_this_process(kvasir):
    done = kvasir("chat", "--temperature", "0", "--max-tokens", "60", stdin=f"{PROBLEM}\n\n/new\nHello!\n")
    assert done.code == 0
    assert ANSWER in done.out and "Hello" in done.out and done.out.count("you ") >= 5, (
        "a prompt for each of the four lines and the end"
    )


def test_a_message_that_is_refused_ends_nothing(kvasir):
    long = "word " * 400
    done = kvasir(
        "chat", "--temperature", "0", "--max-model-len", "192", "--max-tokens", "80", stdin=f"{long}\n{PROBLEM}\n"
    )
    assert done.code == 0 and "refused: " in done.out and ANSWER in done.out


def test_no_tokenizer(kvasir):
    done = kvasir("chat", "--skip-tokenizer-init", stdin="hi\n")
    assert done.code == 2 and "--skip-tokenizer-init" in done.err


@pytest.fixture
def server():
    """A server that answers chats with given lines, one list per request; ``seen`` holds the bodies and keys."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, json.dumps(self.server.models).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.seen.append((body, self.headers.get("Authorization")))
            answer = self.server.answers.pop(0)
            if isinstance(answer, int):
                self.reply(answer, b'{"error": {"message": "no thanks"}}')
            else:
                self.reply(
                    200,
                    b"".join(f"data: {chunk if chunk == END else json.dumps(chunk)}\n\n".encode() for chunk in answer),
                )

        def reply(self, status, data):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.answers, server.seen = {"data": [{"id": "m"}]}, [], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def says(*texts):
    return [*({"choices": [{"delta": {"content": text}}]} for text in texts), END]


def test_a_conversation_with_a_server(kvasir, server):
    server.answers += [says("Good ", "day"), says("Fine")]
    done = kvasir(
        "chat",
        "--url",
        server.url + "/",
        "--system",
        "Be kind.",
        "--api-key",
        "k",
        "--max-tokens",
        "9",
        stdin="hi\nhow?\n",
    )
    assert done.code == 0 and "Good day" in done.out and "Fine" in done.out
    (_, _), (body, key) = server.seen
    assert key == "Bearer k" and body["max_tokens"] == 9 and "temperature" not in body, (
        "what is not given is the server's to choose"
    )
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "Good day"


def test_new_forgets_all_but_the_system_prompt(kvasir, server):
    server.answers += [says("a"), says("b")]
    kvasir("chat", "--url", server.url, "--system", "S", stdin="one\n/new\ntwo\n")
    assert [m["content"] for m in server.seen[1][0]["messages"]] == ["S", "two"]


def test_help_lists_every_command_and_an_unknown_one_is_answered(kvasir, server):
    server.answers += [says("a")]
    done = kvasir("chat", "--url", server.url, stdin="/help\n/hlep\n/tmp/file is what?\n")
    assert done.code == 0 and all(f"\n{name}" in done.out or f" {name} " in done.out for name in COMMANDS)
    assert "no command /hlep. Did you mean '/help'?" in done.out
    assert [body["messages"][-1]["content"] for body, _ in server.seen] == ["/tmp/file is what?"], "a path is a message"


def test_parameters_are_shown_and_set(kvasir, server):
    server.answers += [says("a"), says("b"), says("c")]
    lines = [
        "/params", "one", "/params temperature=0 stop=END", "two", "/params temperature= top_p=0.5 tmperature=1",
        "/params temperature=", "/params oops", "three", "/params",
    ]  # fmt: skip
    done = kvasir("chat", "--url", server.url, "--max-tokens", "9", stdin="\n".join(lines) + "\n")
    given = [{k: v for k, v in body.items() if k not in ("messages", "model", "stream")} for body, _ in server.seen]
    assert given == [
        {"max_tokens": 9},
        {"max_tokens": 9, "temperature": 0, "stop": "END"},
        {"max_tokens": 9, "stop": "END"},
    ], "a wrong name changes nothing"
    assert "no parameter 'tmperature=1'. Did you mean 'temperature'?" in done.out and "name=value" in done.out
    assert 'max_tokens=9 temperature=0 stop="END"' in done.out


def test_a_parameter_that_cannot_be_ends_nothing(kvasir):
    lines = ["/params temperature=-1", "hi", "/params temperature=0 max_tokens=60", PROBLEM]
    done = kvasir("chat", stdin="\n".join(lines) + "\n")
    assert done.code == 0 and "refused: " in done.out and ANSWER in done.out


def test_a_saved_conversation_is_a_request(kvasir, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.answers += [says("An answer"), says("b")]
    lines = [
        "/params temperature=0",
        "hi",
        "/save talk.jsonl",
        "/save talk.jsonl",
        "/save no/such/f.jsonl",
        "/save",
    ]
    done = kvasir("chat", "--url", server.url, "--system", "S", stdin="\n".join(lines) + "\n")
    assert json.loads((tmp_path / "talk.jsonl").read_text()) == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "An answer"},
        ],
        "temperature": 0,
    }
    assert "saved 3 messages to talk.jsonl" in done.out and "cannot write talk.jsonl: File exists" in done.out
    assert "cannot write no/such/f.jsonl" in done.out and len(list(tmp_path.glob("kvasir-chat-*.jsonl"))) == 1
    again = kvasir("generate", "-i", "talk.jsonl", "--max-tokens", "3")
    assert again.code == 0 and json.loads(again.out)["outputs"]


@pytest.mark.parametrize(
    "answer, message",
    [
        (429, "answered 429: no thanks"),
        (500, "no thanks"),
        ([*says("half")[:-1], {"error": {"message": "engine fell over"}}], "engine fell over"),
        (says("half")[:-1], "connection broke off"),
    ],
    ids=["busy", "error", "error in the stream", "broken off"],
)
def test_a_failing_answer_is_told_and_taken_back(kvasir, server, answer, message):
    server.answers += [answer, says("better")]
    done = kvasir("chat", "--url", server.url, stdin="one\ntwo\n")
    assert done.code == 0 and message in done.out and "better" in done.out
    assert [m["content"] for m in server.seen[1][0]["messages"]] == ["two"]


@pytest.mark.parametrize("url", ["foo", "http://127.0.0.1:1", "http://no.such.host.invalid", "http://[", "ftp:///x"])
def test_no_server(kvasir, url):
    done = kvasir("chat", "--url", url, stdin="hi\n")
    assert done.code == 2 and "no server answers" in done.err


def test_another_kind_of_server(kvasir, server):
    server.models = {"hello": 1}
    done = kvasir("chat", "--url", server.url, stdin="hi\n")
    assert done.code == 2 and "does not answer with a list of models" in done.err
