"""The longest answer that a server gives, for everybody and by key: on every route that generates."""

from __future__ import annotations

import time

import httpx
import pytest

from kvasir.api.server import serve
from kvasir.config import ServerConfig, Settings
from kvasir.errors import ConfigError
from tests.api.running import all_routes, key, running

RUNS, WARNING = "/v1/scaling/runs", "x-kvasir-warning"
WORDS = "say: " + "word " * 40
SAY = [{"role": "user", "content": WORDS}]
SCALING = {"strategy": "majority:n=2"}
# Every route that generates: its body, its name for max_tokens, and a finish reason in the reply.
ROUTES = {
    "/v1/chat/completions": ({"messages": SAY}, "max_completion_tokens", '"finish_reason":"length"'),
    "/v1/completions": ({"prompt": WORDS}, "max_tokens", '"finish_reason":"length"'),
    "/v1/responses": ({"input": WORDS}, "max_output_tokens", '"reason":"max_output_tokens"'),
    "/v1/messages": ({"messages": SAY, "max_tokens": 900}, "max_tokens", '"stop_reason":"max_tokens"'),
    RUNS: ({"problems": [{"messages": SAY}], **SCALING}, "max_tokens", '"finish_reason":"length"'),
}
# Other routes of the app that take a body.
NOT_GENERATING = {
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/tokenize", "/detokenize"),
    *("/v1/messages/count_tokens", "/ping"),
}
LIMITS = {"max_output_tokens": 5, "key_max_output_tokens": ("b=e=9", "free=0")}


@pytest.fixture(scope="module")
def limited():
    with running(api_key=("alpha", "b=e", "free"), **LIMITS) as server:
        yield server


@pytest.fixture
def ask(limited):
    def ask(path: str, name: str, **more) -> tuple[httpx.Response, str, int]:
        """The reply, its text (of a run: its end), and the most tokens that the engine was asked for."""
        first = len(limited.engine.seen)
        with httpx.Client(base_url=limited.url, timeout=120, headers=key(name)) as http:
            reply = http.post(path, json=ROUTES[path][0] | more)
            text = reply.text
            while path == RUNS and reply.status_code == 202 and '"running"' in text:
                time.sleep(0.01)
                text = http.get(f"{RUNS}/{reply.json()['id']}").text
        return reply, text, max((r.max_tokens for r in limited.engine.seen[first:]), default=0)

    return ask


def test_the_table_has_every_route(limited):
    bodies = {path for method, path in all_routes(limited) if method == "POST" and "{" not in path}
    assert bodies == set(ROUTES) | NOT_GENERATING, "say of a new route whether it generates"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("name", "most"), [("alpha", 5), ("b=e", 9)])
def test_a_larger_number_is_cut_and_the_caller_is_told(ask, path, name, most):
    _, parameter, cut = ROUTES[path]
    reply, text, asked = ask(path, name, **{parameter: 300})
    assert reply.status_code in (200, 202) and asked == most and cut in text
    assert reply.headers[WARNING] == f"{parameter}=300 was cut to {most}, the limit of this server for this key"
    reply, text, asked = ask(path, name, **{parameter: most})
    assert asked == most and WARNING not in reply.headers and cut in text
    reply, _, asked = ask(path, name, **{parameter: 3})
    assert asked == 3 and WARNING not in reply.headers, "a smaller number holds"


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/v1/messages"])
def test_without_a_number_the_limit_holds_silently(ask, path):
    reply, text, asked = ask(path, "alpha")
    assert asked == 5 and WARNING not in reply.headers and ROUTES[path][2] in text
    assert ask(path, "b=e")[2] == 9
    assert ask(path, "free")[2] >= 16, "0 lifts the server's limit for a key"


def test_a_key_without_limit_is_not_cut(ask):
    for path, (_, parameter, _) in ROUTES.items():
        reply, _, asked = ask(path, "free", **{parameter: 300})
        assert asked == 300 and WARNING not in reply.headers


def test_scaled_chats_streams_and_choices(ask, limited):
    chat = "/v1/chat/completions"
    reply, text, asked = ask(chat, "alpha", scaling=SCALING, max_tokens=300)
    assert reply.status_code == 200 and asked == 5 and '"length"' in text
    assert reply.headers[WARNING].startswith("max_tokens=300 was cut to 5")
    assert ask(chat, "alpha", scaling=SCALING)[2] == 5
    reply, text, asked = ask(chat, "b=e", stream=True, max_tokens=300, n=3)
    assert asked == 9 and "was cut to 9" in reply.headers[WARNING] and text.count('"finish_reason":"length"') == 3
    reply, _, _ = ask("/v1/responses", "alpha", background=True, max_output_tokens=300)
    assert reply.json()["max_output_tokens"] == 5 and "max_output_tokens=300" in reply.headers[WARNING]
    limited.idle()


def test_what_the_limit_cuts_need_not_fit_the_context(ask):
    reply, _, asked = ask("/v1/completions", "alpha", max_tokens=10**9, truncate_prompt_tokens=-1)
    assert reply.status_code == 200 and asked == 5
    assert reply.json()["usage"]["prompt_tokens"] > 40, "room is left for what is generated, not for what was asked"
    assert ask("/v1/completions", "free", max_tokens=10**9)[0].status_code == 400


def test_more_tokens_at_least_than_the_limit_are_refused(ask):
    error = ask("/v1/completions", "alpha", min_tokens=6, max_tokens=20)[0].json()["error"]
    assert error["param"] == "min_tokens" and "limit of an answer for this key is 5" in error["message"]
    assert ask("/v1/completions", "b=e", min_tokens=6, max_tokens=20)[0].status_code == 200


def test_echo_alone_generates_nothing(ask):
    reply, _, asked = ask("/v1/completions", "alpha", echo=True, max_tokens=0)
    assert reply.status_code == 200 and asked == 0


def test_a_run_keeps_the_limit_that_it_began_with(tmp_path):
    """The calls of its journal were made under it; another limit would make other calls."""
    body = ROUTES[RUNS][0] | {"max_tokens": 300}
    folder = str(tmp_path / "runs")
    with running(scaling_runs=folder, max_output_tokens=5) as server:
        server.call(server.engine.gate.clear)
        name = httpx.post(server.url + RUNS, json=body, timeout=120).json()["id"]
        server.until(lambda: server.engine.seen)
    with running(scaling_runs=folder) as server:
        server.until(lambda: server.engine.seen and not server.engine.open)
        assert {r.max_tokens for r in server.engine.seen} == {5}
        assert httpx.get(f"{server.url}{RUNS}/{name}", timeout=120).status_code == 200


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (("alpha",), "is not KEY=N"),
        (("alpha=",), "is not KEY=N"),
        (("alpha=-1",), "is not KEY=N"),
        (("secret=5",), "no --api-key gives"),
        (("alpha=5", "alpha=6"), "has a limit already"),
    ],
)
def test_limits_that_say_nothing_are_refused(entries, why):
    with pytest.raises(ConfigError, match=why) as caught:
        serve(Settings(server=ServerConfig(api_key=("alpha",), key_max_output_tokens=entries)))
    assert not any(text in str(caught.value) for text in ("secret", "alpha")), "keys do not belong in a log"
    with pytest.raises(ConfigError):
        Settings.of(max_output_tokens=-1)


def test_a_settings_file_may_hold_them(tmp_path):
    from kvasir.cli.options import build_settings

    file = tmp_path / "kvasir.toml"
    file.write_text('[server]\napi_key = ["a"]\nmax_output_tokens = 7\nkey_max_output_tokens = ["a=3"]\n')
    server = build_settings({"config": str(file)}).server
    assert server.max_output_tokens == 7 and server.output_limits() == {"a": 3}
