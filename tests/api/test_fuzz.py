"""Fuzzing: requests from the OpenAPI schema, and random bytes for the body reader. No 5xx, no leak."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig

from kvasir.api.http import limits
from kvasir.api.http.limits import MAX_DEPTH, check_shape, clean_id, decode_json
from kvasir.cli import batch
from kvasir.errors import RequestError
from tests.api.running import Running

POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
HEALTHY = {  # few of the schema's own examples are: most carry some field that this server has no use for
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
QUIET = [
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
]


@pytest.fixture(scope="module")
def schema(server: Running):
    return schemathesis.openapi.from_dict(
        httpx.get(server.url + "/openapi.json", timeout=120).json(), config=SchemathesisConfig()
    )


def body_cases(schema, path: str, mode):
    return schema[path]["POST"].as_strategy(generation_mode=mode)


def check(server: Running, http: httpx.Client, path: str, body) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=True).encode()
    r = http.post(path, content=content, headers={"content-type": "application/json"})
    assert r.status_code < 500, (r.text[:500], content[:2000])
    if r.status_code >= 400 and "messages" in path:
        assert set(r.json()) == {"type", "error", "request_id"} and set(r.json()["error"]) == {"type", "message"}
    elif r.status_code >= 400:
        assert set(r.json()["error"]) == {"message", "type", "param", "code"}
    return r.status_code


def fuzz(server, http, schema, path: str, examples: int) -> None:
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=QUIET,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.one_of(*(body_cases(schema, path, mode) for mode in modes)))
    def run(case) -> None:
        if _is_json(case.body):  # not the placeholder for "no body at all"
            statuses.append(check(server, http, path, case.body))

    statuses: list[int] = []
    run()
    server.idle()
    assert 400 in statuses and check(server, http, path, HEALTHY[path]) == 200


def _is_json(value) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("path", POSTS)
def test_requests_from_the_schema(server, http, schema, path):
    fuzz(server, http, schema, path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("path", POSTS)
def test_many_requests_from_the_schema(server, http, schema, path):
    fuzz(server, http, schema, path, 500)


@pytest.fixture(scope="module")
def stored(server: Running) -> list[str]:
    """The ids of a stored response, a background one and a streamed background one, all ended."""
    names = []
    for more in ({}, {"background": True}, {"background": True, "stream": True}):
        with httpx.stream("POST", server.url + "/v1/responses", json={"input": "a", **more}, timeout=120) as r:
            names.append(re.search(r'"id":"(resp-[^"]+)"', r.read().decode())[1])
    server.idle()
    return names


def test_any_id_and_query_of_a_stored_response(server, http, stored):
    words = st.one_of(st.sampled_from(["true", "false", "0", "-1", "5", "reasoning.encrypted_content"]), st.text())
    queries = st.dictionaries(
        st.sampled_from(["stream", "starting_after", "include", "include[]", "include_obfuscation", "x"]), words
    )

    @settings(
        max_examples=200,
        deadline=None,
        suppress_health_check=QUIET,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(
        st.sampled_from(stored) | st.text(min_size=1).filter(lambda t: t.strip("./")),
        st.sampled_from([("GET", ""), ("POST", "/cancel"), ("DELETE", "x"), ("PATCH", ""), ("GET", "/cancel")]),
        queries,
        st.binary(max_size=20),
    )
    def run(name, route, query, body) -> None:
        method, end = route
        path = f"/v1/responses/{quote(name, safe='', errors='replace')}{end}"
        r = http.request(method, path, params=query, content=body)
        assert r.status_code < 500, (r.text[:300], path, query)
        if r.status_code >= 400:
            assert set(r.json()["error"]) == {"message", "type", "param", "code"}
        statuses.add(r.status_code)

    statuses: set[int] = set()
    run()
    server.idle()
    assert statuses & {400, 404, 405}
    # The states that the draws reach depend on Hypothesis and on the modules that are loaded: one stream of 200 in five
    # cancelled no background response. So each answer of the routes is asked for by name.
    plain, background, streamed = (f"/v1/responses/{name}" for name in stored)
    for method, path, status in (
        *(("GET", path, 200) for path in (plain, background, streamed, f"{streamed}?stream=true&starting_after=0")),
        ("GET", f"{plain}x", 404),
        ("GET", f"{plain}?stream=true", 400),
        ("GET", f"{background}?stream=true", 400),
        ("GET", f"{streamed}?stream=true&starting_after=-2", 400),
        ("GET", f"{plain}?include=reasoning.encrypted_content", 400),
        ("POST", f"{plain}/cancel", 400),
        ("POST", f"{background}/cancel", 200),
        ("POST", f"{streamed}/cancel", 200),
        ("POST", f"{plain}x/cancel", 404),
        ("PATCH", plain, 405),
        ("DELETE", f"{plain}x", 404),
    ):
        assert http.request(method, path).status_code == status, (method, path)


@given(
    st.lists(st.one_of(st.text(), st.binary().map(repr), st.sampled_from(['{"custom_id": "a", "url": 1}', "[", "5"])))
)
def test_any_line_of_a_batch_is_a_line(lines):
    text = "\n".join(lines)
    assert len(batch.parse(text)) == sum(bool(each.strip()) for each in text.split("\n"))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def mutations(model) -> st.SearchStrategy:
    """A healthy body with some fields set to anything at all."""
    names = st.sampled_from(sorted(model.model_fields))
    return st.dictionaries(names, VALUES, min_size=1, max_size=3)


def mutate(server, http, examples: int) -> None:
    from kvasir.api.protocols.messages_protocol import CountTokensBody, MessagesBody
    from kvasir.api.protocols.openai import ChatBody, CompletionBody
    from kvasir.api.protocols.protocol_responses import ResponsesBody

    routes = {
        "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        "/v1/completions": (CompletionBody, {"prompt": "hi", "max_tokens": 3}),
        "/v1/responses": (ResponsesBody, {"input": "hi", "max_output_tokens": 3}),
        "/v1/messages": (MessagesBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        "/v1/messages/count_tokens": (CountTokensBody, {"messages": [{"role": "user", "content": "hi"}]}),
    }
    for path, (model, healthy) in routes.items():
        fields = mutations(model)

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=QUIET,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )
        @given(st.just(path), st.just(healthy), fields)
        def run(path, healthy, change) -> None:
            check(server, http, path, {**healthy, **change})

        run()
    server.idle()


def test_any_value_in_any_field(server, http):
    mutate(server, http, 80)


@pytest.mark.slow
def test_any_value_in_any_field_at_length(server, http):
    mutate(server, http, 1500)


def depth_of(value) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


TRICKY = st.text(alphabet='[]{}"\\,: a', max_size=12)
NESTED = st.recursive(
    TRICKY | st.integers(), lambda v: st.lists(v, max_size=3) | st.dictionaries(TRICKY, v, max_size=3), max_leaves=20
)


@settings(max_examples=300, deadline=None)
@given(NESTED, st.integers(0, 80))
def test_depth_is_counted_exactly_and_strings_do_not_count(value, extra):
    for _ in range(extra):
        value = [value]
    body = json.dumps({"a": value}).encode()
    if depth_of({"a": value}) <= MAX_DEPTH:
        assert decode_json(body) == {"a": value}
    else:
        with pytest.raises(RequestError):
            check_shape(body)


def balanced(body: bytes) -> bool:
    """The reference for ``check_shape``: a regular expression drops the strings, and each pass the innermost pairs."""
    brackets = re.sub(rb'"[^"\\]*(?:\\.?[^"\\]*)*"?', b"", body, flags=re.DOTALL)
    brackets = re.sub(rb"[^\[\]]", b"", brackets.translate(bytes.maketrans(b"{}", b"[]")))
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return not brackets


MARKS = st.lists(
    st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b"e", b" ", b"[" * 64, b"]" * 64, b"\xff"]), max_size=16
).map(b"".join)


@pytest.mark.parametrize("piece", [2, 3, limits.PIECE])
def test_depth_is_that_of_the_plain_form_however_a_body_is_cut(monkeypatch, piece):
    @settings(max_examples=1000, deadline=None)
    @given(MARKS)
    def run(body) -> None:
        try:
            check_shape(body)
        except RequestError:
            seen.add(False)
            assert not balanced(body)
        else:
            seen.add(True)
            assert balanced(body)

    monkeypatch.setattr(limits, "PIECE", piece)
    seen: set[bool] = set()
    run()
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("part", "count"), [(b"[]", 1), (b"{}", 1), (b'"a"', 1), (rb'"\"[]\\"', 1), (b'{"a":[]}', 3), (b"5", 0)]
)
def test_a_body_has_a_bounded_number_of_parts(monkeypatch, part, count):
    """Strings, arrays and objects are counted exactly; numbers are not."""
    body = b'{"a":[' + b",".join([part] * 20) + b"]}"
    monkeypatch.setattr(limits, "PIECE", 7)
    monkeypatch.setattr(limits, "MAX_PARTS", 20 * count + 3)
    assert len(decode_json(body)["a"]) == 20
    monkeypatch.setattr(limits, "MAX_PARTS", 20 * count + 2)
    with pytest.raises(RequestError, match=f"more than {20 * count + 2} strings, arrays and objects") as caught:
        decode_json(body)
    assert caught.value.status == 413


@pytest.mark.parametrize("unit", [b"[5],", b"[],", b'"ab",'])
def test_the_largest_body_of_many_parts_never_reaches_the_decoder(monkeypatch, unit):
    """Decoding four million lists took 2.4 s in one call."""
    monkeypatch.setattr(limits.msgspec.json, "decode", lambda _: pytest.fail("decoded"))
    with pytest.raises(RequestError, match="the body holds more than"):
        decode_json(b'{"a":[' + unit * ((16 << 20) // len(unit)) + b"0]}")


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(alphabet='[]{}"\\,:0eE.-+ntfu\ud800a ', max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")),
    )
)
def test_any_bytes_decode_or_are_refused(body):
    try:
        value = decode_json(body)
    except RequestError as e:
        assert e.status == 400
    else:
        assert isinstance(value, dict) and msgspec.json.decode(msgspec.json.encode(value)) == value


@given(st.text())
def test_request_ids_are_always_safe(text):
    assert (
        1 <= len(clean_id(text)) <= 64 and clean_id(text).isascii() and not set(clean_id(text)) & set("\r\n \t\0/<>\"'")
    )


def test_bad_bytes_by_the_thousand_reach_no_5xx(server, http):
    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=QUIET,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.binary(max_size=80), st.sampled_from(POSTS))
    def run(body, path) -> None:
        check(server, http, path, body)

    run()
    server.idle()


@pytest.mark.parametrize("number", [b"1e300", b"1.5E+300", b"9e00300", b"2.2250738585072011e-308"])
def test_numbers_that_take_long_are_bounded(number):
    """Decoding 350,000 of them took three seconds, in which no other request ran."""
    body = b'{"a":[' + b",".join([number] * 350_000) + b"]}"
    with pytest.raises(RequestError) as refused:
        decode_json(body)
    assert refused.value.status == 413 and "exponents" in refused.value.message
    few = b'{"a":[' + b",".join([b"1e300", b"1e30", b"1e-300"] * 5000) + b"]}"
    assert len(decode_json(few)["a"]) == 15_000
