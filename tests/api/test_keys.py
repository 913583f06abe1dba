"""API keys, the tenants that come from them, and CORS."""

from __future__ import annotations

import httpx
import pytest

from tests.api.running import all_routes, key, running

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "say: hello world"}]}
# Paths that need no key.
OPEN = {"/", "/health", "/health/live", "/ping"}


@pytest.fixture(scope="module")
def guarded():
    with running(api_key=("alpha", "beta")) as server:
        yield server


def test_every_route_but_four_needs_a_key(guarded):
    routes = all_routes(guarded)
    assert {("POST", CHAT), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/health/ready")} <= routes
    with httpx.Client(base_url=guarded.url, timeout=120) as http:
        for method, path in sorted(routes):
            for headers in (
                {},
                key("wrong"),
                {"authorization": "Bearer"},
                {"authorization": "alpha"},
                {"authorization": "Basic alpha"},
                key("alph"),
                key("alphaa"),
                key("alpha beta"),
            ):
                r = http.request(method, path, headers=headers)
                if path in OPEN:
                    assert r.status_code != 401, path
                else:
                    assert r.status_code == 401 and r.headers["www-authenticate"] == "Bearer", (method, path, headers)
            for good in ("alpha", "beta"):
                assert http.request(method, path, headers=key(good)).status_code != 401, path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "//v1/models"),
        ("GET", "/v1/../v1/models"),
        ("GET", "/v1%2Fmodels"),
        ("GET", "/%2e%2e/metrics"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", CHAT),
        ("TRACE", "/v1/models"),
        ("GET", "/v1/models?api_key=alpha"),
        ("GET", "/health/live/"),
        ("GET", "/health/live/../ready"),
        ("GET", "/nothing"),
        ("GET", "/health//live"),
    ],
)
def test_the_guard_cannot_be_walked_around(guarded, method, path):
    import http.client as raw  # a client that does not tidy paths

    connection = raw.HTTPConnection(guarded.url.removeprefix("http://"), timeout=60)
    connection.request(method, path)
    assert connection.getresponse().status == 401
    connection.close()


def test_who_has_no_key_is_counted():
    with running(api_key=("k",)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        http.get("/v1/models")
        assert (
            'kvasir:http_requests_total{route="none",status="401"} 1.0' in http.get("/metrics", headers=key("k")).text
        )


def test_metrics_are_public_only_when_asked_for():
    with running(api_key=("k",)) as server:
        assert httpx.get(server.url + "/metrics", timeout=120).status_code == 401
    with running(api_key=("k",), public_metrics=True) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert "kvasir:num_pages" in http.get("/metrics").text
        assert http.get("/v1/models").status_code == http.post("/metrics").status_code - 4 == 401


def test_tenants_come_from_keys_only(guarded):
    body = {"messages": [{"role": "user", "content": "say: secret"}]}
    with httpx.Client(base_url=guarded.url, timeout=120) as http:
        cached = [
            http.post(CHAT, json=body, headers=key(k)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for k in ("alpha", "alpha", "beta", "beta")
        ]
        assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0 and cached[3] > 0
        tenants = [r.tenant for r in guarded.engine.seen[-4:]]
        assert tenants[0] == tenants[1] != tenants[2] == tenants[3] and "alpha" not in tenants[0]
        assert http.post(CHAT, json={**body, "tenant": tenants[2]}, headers=key("alpha")).status_code == 400
        http.post(CHAT, json={**body, "cache_salt": tenants[2]}, headers=key("alpha"))
        assert guarded.engine.seen[-1].tenant not in tenants, "a salt adds to the tenant of the key"


def test_x_api_key_counts_as_a_key(guarded):
    """Anthropic clients send the key there, some of them next to a made-up bearer token."""
    with httpx.Client(base_url=guarded.url, timeout=120) as http:
        for headers in (
            {"x-api-key": "beta"},
            {"x-api-key": "beta", **key("wrong")},
            {"x-api-key": "no", **key("beta")},
        ):
            assert http.post(CHAT, json=SAY, headers=headers).status_code == 200
        tenants = {r.tenant for r in guarded.engine.seen[-3:]}
        http.post(CHAT, json=SAY, headers=key("beta"))
        assert tenants == {guarded.engine.seen[-1].tenant}, "one key is one tenant, wherever it stands"
        for wrong in ("", "alph", "Bearer alpha", "alpha beta"):
            assert http.post(CHAT, json=SAY, headers={"x-api-key": wrong}).status_code == 401


def test_one_key_is_no_tenant():
    with running(api_key=("alpha",)) as server:
        httpx.post(server.url + CHAT, json=SAY, headers=key("alpha"), timeout=120)
        assert server.engine.seen[-1].tenant == ""


def test_a_refused_preflight_names_the_flag(guarded, caplog):
    """Browsers send no key with it, so the key guard must not be what answers."""
    asked = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    with running() as free:
        for server in (guarded, free):
            r = httpx.options(server.url + CHAT, headers=asked, timeout=120)
            assert r.status_code == 403 and "access-control-allow-origin" not in r.headers
            assert "--allowed-origins http://localhost:3000" in r.json()["error"]["message"]
        r = httpx.options(guarded.url + "/v1/messages", headers={**asked, "origin": "x" * 5000}, timeout=120)
        assert r.json()["error"]["type"] == "permission_error" and len(r.content) < 800
        assert httpx.options(guarded.url + CHAT, timeout=120).status_code == 401, "no preflight, so it needs a key"
        for i in range(20):
            httpx.options(free.url + CHAT, headers={**asked, "origin": f"http://{i}"}, timeout=120)
    logged = [r.getMessage() for r in caplog.records if "--allowed-origins" in r.getMessage()]
    assert any("http://localhost:3000" in line for line in logged), "consoles of browsers do not show the reply"
    assert len(logged) < 20, "a page cannot fill the log"


def test_cors_is_off_unless_asked_for(http):
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=origin).headers
    assert http.options(CHAT).status_code == 405, "OPTIONS that is no preflight is like any other method"
    with (
        running(api_key=("alpha",), allowed_origins=("https://good.example",)) as server,
        httpx.Client(base_url=server.url, timeout=120) as own,
    ):
        good = own.options(CHAT, headers={**origin, "origin": "https://good.example"})
        assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "https://good.example"
        asked = own.options(
            CHAT,
            headers={**origin, "origin": "https://good.example", "access-control-request-headers": "x-stainless-os"},
        )
        assert asked.status_code == 200 and "x-stainless-os" in asked.headers["access-control-allow-headers"], (
            "OpenAI's own client sends it"
        )
        seen = own.get("/health", headers={"origin": "https://good.example"}).headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after", "warning"} <= set(seen.split(", "))
        assert "access-control-allow-origin" not in own.options(CHAT, headers=origin).headers
        assert own.options(CHAT, headers=origin).json()["error"]["code"] == "cors_refused"
        assert own.post(CHAT, json=SAY, headers={"origin": "https://good.example"}).status_code == 401
