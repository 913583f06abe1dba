"""The routes of embedding models and rerankers: bodies, replies, refusals, and fuzz, with a fake engine behind them."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
import schemathesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig

from kvasir.api.protocols.protocol_pooling import EmbeddingsBody, RerankBody, ScoreBody
from kvasir.api.text.pooling import PoolingText, cosine
from kvasir.errors import RequestError
from kvasir.models.families import find_family
from kvasir.types import ModelInfo, Pooling
from tests.api.fake_client import FakeClient, tokenizer
from tests.api.running import key, running
from tests.api.test_fuzz import QUIET, _is_json, body_cases, check, mutations

WIDTH = 64
PROMPTS = {"query": "say hello: ", "document": ""}
EMBED = Pooling(task="embed", width=WIDTH, prompts=PROMPTS)
TEMPLATE = find_family("qwen3").RERANKER.template
SCORE = Pooling(task="score", tokens=(1, 2), template=TEMPLATE)
EMBEDDINGS, SCORES, RERANKS = "/v1/embeddings", ("/v1/score", "/score"), ("/v1/rerank", "/v2/rerank", "/rerank")
HEALTHY = {
    EMBEDDINGS: {"input": "the quick brown fox"},
    **dict.fromkeys(SCORES, {"text_1": "fox", "text_2": ["the quick brown fox", "Paris"]}),
    **dict.fromkeys(RERANKS, {"query": "fox", "documents": ["Paris", "the quick brown fox"]}),
}
BODIES = {
    EMBEDDINGS: EmbeddingsBody,
    **dict.fromkeys(SCORES, ScoreBody),
    **dict.fromkeys(RERANKS, RerankBody),
}


@pytest.fixture(scope="module")
def embedder():
    with running(FakeClient(pooling=EMBED)) as server:
        yield server


@pytest.fixture(scope="module")
def reranker():
    with running(FakeClient(pooling=SCORE)) as server:
        yield server


@pytest.fixture(scope="module")
def generator():
    with running(FakeClient()) as server:
        yield server


def post(server, path, body, status=200, **headers):
    import httpx

    r = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert r.status_code == status, r.text
    server.idle()
    return r.json()


# ---------------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_by_openais_client(embedder):
    """The client asks for base64 by itself and decodes it."""
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="x") as client:
        reply = client.embeddings.create(model="fake", input=["hello world", "Paris", "hello world"])
        assert [d.index for d in reply.data] == [0, 1, 2] and reply.model == "fake"
        assert reply.data[0].embedding == reply.data[2].embedding != reply.data[1].embedding
        assert abs(np.linalg.norm(reply.data[0].embedding) - 1) < 1e-6
        lengths = [len(tokenizer().encode(text)) for text in ("hello world", "Paris", "hello world")]
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(lengths)
        short = client.embeddings.create(model="fake", input="hello world", dimensions=5, encoding_format="float")
        assert len(short.data[0].embedding) == 5


@pytest.mark.parametrize("form", ["text", "ids", "list", "list of ids"])
def test_every_form_of_input_gives_the_same_vector(embedder, form):
    ids = tokenizer().encode("the quick brown fox")
    value = {"text": "the quick brown fox", "ids": ids, "list": ["the quick brown fox"], "list of ids": [ids]}[form]
    reply = post(embedder, EMBEDDINGS, {"input": value})
    plain = post(embedder, EMBEDDINGS, {"input": "the quick brown fox"})
    assert reply["data"] == plain["data"] and reply["object"] == "list"
    assert reply["data"][0]["object"] == "embedding" and len(reply["data"][0]["embedding"]) == WIDTH


def test_base64_holds_the_same_numbers(embedder):
    floats = post(embedder, EMBEDDINGS, {"input": "fox", "encoding_format": "float"})["data"][0]["embedding"]
    text = post(embedder, EMBEDDINGS, {"input": "fox", "encoding_format": "base64"})["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == floats


def test_prompts_of_the_folder(embedder):
    written = post(embedder, EMBEDDINGS, {"input": "say hello: fox"})["data"]
    for named in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "search_query"}):
        assert post(embedder, EMBEDDINGS, {"input": "fox", **named})["data"] == written
    for named in ({}, {"input_type": "passage"}):
        assert post(embedder, EMBEDDINGS, {"input": "fox", **named})["data"] != written


def test_documents_need_no_prompt_of_their_own():
    text = text_of(task="embed", prompts={"query": "Q: "})
    assert (text.prompt(None, "passage"), text.prompt("query"), text.prompt()) == ("", "Q: ", "")
    assert text_of(task="embed", prompts={"query": "Q: "}, default_prompt="query").prompt() == "Q: "
    for unknown in ((None, "clustering"), ("document", None)):
        with pytest.raises(RequestError, match="names no prompt"):
            text.prompt(*unknown)
    with pytest.raises(RequestError, match="it names none"):
        text_of(task="embed").prompt(None, "document")


def test_longer_texts_are_cut_when_asked_for(embedder):
    long = "hello world " * 600
    refused = post(embedder, EMBEDDINGS, {"input": ["fox", long]}, 400)["error"]
    assert refused["param"] == "input" and refused["code"] == "context_length_exceeded"
    assert refused["message"].startswith("input[1]: the prompt has")
    for most, count in ((-1, 1024), (7, 7)):
        reply = post(embedder, EMBEDDINGS, {"input": long, "truncate_prompt_tokens": most})
        assert reply["usage"]["prompt_tokens"] == count
    ids = tokenizer().encode(long)
    assert post(embedder, EMBEDDINGS, {"input": ids[:7]})["data"] == reply["data"]


BAD = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": ["a", [5]]}, "input"),
    ({"input": [5, -1]}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "prompt_name": "quarry"}, "prompt_name"),
    ({"input": "a", "prompt_name": "query", "input_type": "query"}, "input_type"),
    ({"input": [5], "prompt_name": "query"}, "prompt_name"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
    ({"input": "a", "normalize": True, "use_activation": True}, "normalize"),
    ({"input": "a", "input_types": "query"}, "input_types"),
    ({"input": "a", "model": "other"}, "model"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[str(body)[:60] for body, _ in BAD])
def test_bad_bodies_are_refused_by_name(embedder, body, param):
    refused = post(embedder, EMBEDDINGS, body, 404 if param == "model" else 400)["error"]
    assert refused["param"] == param, refused


def test_an_unknown_prompt_gets_the_nearest_name(embedder):
    message = post(embedder, EMBEDDINGS, {"input": "a", "prompt_name": "quary"}, 400)["error"]["message"]
    assert "it names query, document" in message and "Did you mean 'query'?" in message


# ------------------------------------------------------------------------------------------------------ scores, rerank


@pytest.mark.parametrize("path", SCORES)
def test_scores_of_pairs(reranker, path):
    texts = ["the quick brown fox", "Paris Paris"]
    reply = post(reranker, path, {"text_1": "fox", "text_2": texts})
    text = PoolingText(tokenizer(), reranker.engine.info)
    ids = [text.pair_ids("fox", t) for t in texts]
    assert [d["score"] for d in reply["data"]] == pytest.approx([len(set(i)) / len(i) for i in ids])
    assert reply["usage"]["total_tokens"] == sum(map(len, ids)) and reply["data"][1]["object"] == "score"
    assert post(reranker, path, {"queries": "fox", "documents": texts})["data"] == reply["data"]
    both = post(reranker, path, {"text_1": ["fox", "Paris"], "text_2": texts})
    assert both["data"][0] == reply["data"][0] and both["data"][1] != reply["data"][1]
    raw = post(reranker, path, {"text_1": "fox", "text_2": texts, "use_activation": False})
    assert [d["score"] for d in raw["data"]] == pytest.approx([8 * d["score"] for d in reply["data"]])


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_documents_come_in_the_order_of_their_scores(request, kind, path):
    server = request.getfixturevalue(kind)
    documents = ["Paris Paris Paris", {"text": "the quick brown fox"}, "fox fox"]
    reply = post(server, path, {"query": "fox", "documents": documents, "model": "fake"})
    scores = [r["relevance_score"] for r in reply["results"]]
    assert scores == sorted(scores, reverse=True) and sorted(r["index"] for r in reply["results"]) == [0, 1, 2]
    texts = {r["index"]: r["document"]["text"] for r in reply["results"]}
    assert texts == {0: "Paris Paris Paris", 1: "the quick brown fox", 2: "fox fox"} and reply["id"].startswith(
        "rerank-"
    )
    first = post(server, path, {"query": "fox", "documents": documents, "top_n": 1, "return_documents": False})
    assert first["results"] == [{k: reply["results"][0][k] for k in ("index", "relevance_score")}]


def test_an_embedding_model_scores_by_the_cosine(embedder):
    texts = ["fox", "the quick brown fox", "Paris"]
    data = post(embedder, EMBEDDINGS, {"input": texts})["data"]
    vectors = [np.array(d["embedding"], "<f4") for d in data]
    reply = post(embedder, SCORES[0], {"text_1": "fox", "text_2": texts})
    assert [d["score"] for d in reply["data"]] == pytest.approx([cosine(vectors[0], v) for v in vectors])
    assert reply["data"][0]["score"] == pytest.approx(1)
    for name, value in (("instruction", "a"), ("use_activation", False)):
        refused = post(embedder, SCORES[0], {"text_1": "a", "text_2": "b", name: value}, 400)
        assert refused["error"]["param"] == name


BAD_PAIRS = [
    (SCORES[0], {"text_1": "a"}, "text_2"),
    (SCORES[0], {"text_1": [], "text_2": "a"}, "text_1"),
    (SCORES[0], {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORES[0], {"queries": "a", "text_2": "b"}, "documents"),
    (SCORES[0], {"queries": "a", "documents": "b", "text_2": "b"}, "text_1"),
    (SCORES[0], {"text_1": "a", "text_2": "b", "instruction": 5}, "instruction"),
    (RERANKS[0], {"query": "a"}, "documents"),
    (RERANKS[0], {"query": "a", "documents": []}, "documents"),
    (RERANKS[0], {"query": "a", "documents": ["a", {"title": "b"}]}, "documents"),
    (RERANKS[0], {"query": "a", "documents": ["a", 5]}, "documents"),
    (RERANKS[0], {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    (RERANKS[0], {"query": "a", "documents": ["a"], "rank_fields": ["b"]}, "rank_fields"),
    (RERANKS[0], {"query": "a", "documents": ["a", "hello " * 3000]}, "documents"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_PAIRS, ids=[str(body)[:60] for _, body, _ in BAD_PAIRS])
def test_bad_pairs_are_refused_by_name(reranker, path, body, param):
    assert post(reranker, path, body, 400)["error"]["param"] == param


# --------------------------------------------------------------------------------------------------- prompts of pairs


def text_of(source: str | None = None, **pooling) -> PoolingText:
    from kvasir.models.tokenizer import Tokenizer

    own = tokenizer() if source is None else Tokenizer(tokenizer()._backend, {}, {"default": source})
    info = ModelInfo(name="m", max_model_len=64, vocab_size=500, tokenizer_size=500, pooling=Pooling(**pooling))
    return PoolingText(own, info)


def test_the_prompt_of_the_family():
    text = text_of(task="score", tokens=(1, 2), template=TEMPLATE)
    ids = text.pair_ids("fox <|im_end|>", "the {query}", "be quick")
    shown = tokenizer().decode(ids, skip_special=False)
    assert shown == (
        TEMPLATE.before + "<Instruct>: be quick\n<Query>: fox <|im_end|>\n<Document>: the {query}" + TEMPLATE.after
    )
    assert ids.count(tokenizer().token_to_id("<|im_end|>")) == 2, "that of the query is plain text"
    assert "Given a web search query" in tokenizer().decode(text.pair_ids("a", "b"))


def test_a_long_document_is_cut_and_the_end_of_the_prompt_is_not():
    text = text_of(task="score", tokens=(1, 2), template=TEMPLATE)
    whole = text.pair_ids("fox", "hello world " * 50)
    ids = text.pair_ids("fox", "hello world " * 50, None, len(whole) - 30)
    assert len(ids) == len(whole) - 30 and tokenizer().decode(ids, skip_special=False).endswith(TEMPLATE.after)


def test_a_pair_that_the_client_formatted_is_left_alone():
    text = text_of(task="score", tokens=(1, 2), template=TEMPLATE)
    plain = text.pair_ids("fox", "hello", "be quick")
    query = TEMPLATE.before + "<Instruct>: be quick\n<Query>: fox\n"
    assert text.pair_ids(query, "<Document>: hello" + TEMPLATE.after) == plain
    with pytest.raises(RequestError, match="cannot be cut"):
        text.pair_ids(query, "<Document>: hello" + TEMPLATE.after, None, 20)


ROLES = (
    "{% for m in messages %}{% if m['role'] == 'query' %}Q {{ m.content }}{% elif m['role'] == 'document' %}"
    " D {{ m.content }}{% else %}S {{ m.content }} {% endif %}{% endfor %} end"
)


def test_a_template_with_roles_comes_first():
    text = text_of(ROLES, task="score", tokens=(1, 2), template=TEMPLATE)
    assert tokenizer().decode(text.pair_ids("fox", "hello")) == "Q fox D hello end"
    assert tokenizer().decode(text.pair_ids("fox", "hello", "be")) == "S be Q fox D hello end"
    whole = len(text.pair_ids("fox", "hello world hello world"))
    cut = text.pair_ids("fox", "hello world hello world", None, whole - 2)
    assert len(cut) <= whole - 2 and tokenizer().decode(cut).endswith(" end")


def test_without_a_template_the_texts_follow_each_other():
    text = text_of(task="score", labels=1)
    assert text.pair_ids("fox", " hello") == tokenizer().encode("fox") + tokenizer().encode(" hello")
    assert len(text.pair_ids("fox", "hello world " * 9, None, 12)) == 12
    with pytest.raises(RequestError, match="no instruction"):
        text.pair_ids("fox", "hello", "be quick")


# ---------------------------------------------------------------------------------------------------------- the server


GENERATES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/scaling/runs": {"strategy": "majority:n=2", "problems": [{"messages": [{"role": "user", "content": "a"}]}]},
}


def test_a_model_that_generates_says_so(generator):
    for path, body in HEALTHY.items():
        error = post(generator, path, body, 400)["error"]
        assert error["code"] == "unsupported_task" and error["param"] == "model"
        assert "'fake' generates text; it serves /v1/chat/completions" in error["message"]


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_a_pooling_model_says_so(request, kind):
    server = request.getfixturevalue(kind)
    refused = {**GENERATES, **({EMBEDDINGS: HEALTHY[EMBEDDINGS]} if kind == "reranker" else {})}
    for path, body in refused.items():
        error = post(server, path, body, 400)["error"]
        what = "is an embedding model" if kind == "embedder" else "is a reranker"
        assert error["code"] == "unsupported_task" and what in error["message"] and "/v1/score" in error["message"]


@pytest.mark.parametrize("path", HEALTHY)
def test_the_reply_to_an_engine_that_fails(embedder, path):
    embedder.engine.failure = RequestError("a planted fault", status=500, code="internal_numeric_error")
    try:
        assert post(embedder, path, HEALTHY[path], 500)["error"]["code"] == "internal_numeric_error"
        embedder.engine.failure, embedder.engine.refusal = None, RequestError("full", status=429, retry_after=2.0)
        assert post(embedder, path, HEALTHY[path], 429)["error"]["message"] == "full"
    finally:
        embedder.engine.failure = embedder.engine.refusal = None
    assert post(embedder, path, HEALTHY[path])


def test_a_client_that_leaves_cancels_everything(embedder):
    import httpx

    embedder.engine.delay = 30.0
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(embedder.url + EMBEDDINGS, json={"input": ["a", "b", "c"]}, timeout=0.5)
        embedder.idle()
    finally:
        embedder.engine.delay = 0.0


def test_tenants_are_kept_apart():
    with running(FakeClient(pooling=EMBED), api_key=("one", "two")) as server:
        body = {"input": "the quick brown fox"}
        hits = [
            post(server, EMBEDDINGS, body, **key(name))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for name in ("one", "two", "one")
        ]
        assert hits[:2] == [0, 0] and hits[2] > 0
        post(server, EMBEDDINGS, body, 401)


def test_more_texts_than_the_queue_holds():
    with running(FakeClient(pooling=EMBED, max_queued_requests=8)) as server:
        error = post(server, EMBEDDINGS, {"input": ["a"] * 9}, 400)["error"]
        assert error["param"] == "input" and error["code"] == "too_large"
        assert len(post(server, EMBEDDINGS, {"input": ["a"] * 8})["data"]) == 8


# ---------------------------------------------------------------------------------------------------------------- fuzz


def quiet(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=QUIET,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
@pytest.mark.parametrize("path", [EMBEDDINGS, SCORES[0], RERANKS[0]])
def test_any_value_in_any_field(request, kind, path):
    import httpx

    server = request.getfixturevalue(kind)
    statuses = set()
    with httpx.Client(base_url=server.url, timeout=60) as http:

        @quiet(120)
        @given(mutations(BODIES[path]))
        def run(change) -> None:
            statuses.add(check(server, http, path, {**HEALTHY[path], **change}))

        run()
    server.idle()
    assert 400 in statuses and statuses <= {200, 400, 404, 413}


@pytest.mark.parametrize("path", [EMBEDDINGS, SCORES[0], RERANKS[0]])
def test_requests_from_the_schema(embedder, path):
    import httpx

    schema = schemathesis.openapi.from_dict(
        httpx.get(embedder.url + "/openapi.json", timeout=60).json(), config=SchemathesisConfig()
    )
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    statuses = set()
    with httpx.Client(base_url=embedder.url, timeout=60) as http:

        @quiet(40)
        @given(st.one_of(*(body_cases(schema, path, mode) for mode in modes)))
        def run(case) -> None:
            if _is_json(case.body):
                statuses.add(check(embedder, http, path, case.body))

        run()
        embedder.idle()
        assert 400 in statuses and check(embedder, http, path, HEALTHY[path]) == 200
