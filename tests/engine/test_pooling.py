"""Embeddings and scores equal transformers, whatever the chunks, the crowd, the cache and the preemptions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvasir.client.admission import admit, admit_pooling
from kvasir.engine.ways import pooling
from kvasir.errors import ConfigError, RequestError
from kvasir.types import ModelInfo, PoolingParams, Request, SamplingParams
from tests import checkpoints, pooling_checkpoints
from tests.engine.driver import Driver

PAGE, LENGTH, WIDTH = 16, 70, 32
PROMPT = [3 + i * i % 90 for i in range(LENGTH)]
PROMPTS = [[3 + (i * (k + 2) + k) % 91 for i in range(1 + k * 11)] for k in range(7)] + [PROMPT]
MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind of pooling, a model that embeds."""
    return {
        rows: pooling_checkpoints.embedding(tmp_path_factory.mktemp(rows) / "model", rows=mode, max_window_layers=0)
        for rows, mode in MODES.items()
    }


@pytest.fixture(scope="module")
def wanted(folders):
    """Hidden states of every prompt, from transformers."""
    return {tuple(ids): pooling_checkpoints.states(folders["last"], ids) for ids in PROMPTS}


def expected(states_TE: torch.Tensor, rows: str, dimensions: int = WIDTH) -> np.ndarray:
    vector = {"last": states_TE[-1], "cls": states_TE[0], "mean": states_TE.mean(0)}[rows]
    return F.normalize(vector[:dimensions], dim=0).numpy()


class Pooling(Driver):
    """A driver of requests that pool."""

    def __init__(self, model, **options) -> None:
        super().__init__(str(model), max_model_len=128, **options)
        self.vectors: dict[str, np.ndarray] = {}

    def ask(self, name: str, ids: list[int], **params):
        return admit_pooling(ids, PoolingParams(**params), self.engine.info, id=name, arrival=float(self.steps))

    def _take(self, events) -> None:
        super()._take(events)
        for event in events:
            if event.pooled is not None:
                assert event.finish_reason == "stop" and not event.token_ids and event.request_id not in self.vectors
                self.vectors[event.request_id] = np.frombuffer(event.pooled, "<f4")


def embed_all(model, prompts=PROMPTS, preempt_every=0, gap=0, params=None, **options) -> dict[int, np.ndarray]:
    driver = Pooling(model, **options)
    try:
        requests = [driver.ask(str(i), ids, **(params or {})) for i, ids in enumerate(prompts)]
        driver.run(requests, preempt_every=preempt_every, gap=gap)
        assert not driver.errors
        return {int(name): vector for name, vector in driver.vectors.items()}
    finally:
        driver.close()


WAYS = {
    "alone": dict(max_num_seqs=1),
    "crowd": {},
    "chunks": dict(max_num_batched_tokens=16),
    "one row": dict(max_num_batched_tokens=1),
    "odd chunks": dict(max_num_batched_tokens=13),
    "overlap": dict(max_num_batched_tokens=24, overlap=True),
    "preempted": dict(max_num_batched_tokens=16, preempt_every=2),
    "preempted in flight": dict(max_num_batched_tokens=16, preempt_every=3, overlap=True),
    "few pages": dict(num_pages=9, max_num_batched_tokens=24),
    "no cache": dict(enable_prefix_caching=False),
    "pieces": dict(pieces=True),
    "pieces in chunks": dict(pieces=True, max_num_batched_tokens=24, overlap=True),
    "not exact": dict(batch_invariant=False, max_num_batched_tokens=40),
    "one by one": dict(gap=3, max_num_batched_tokens=24),
}


# A mean has a state across steps, so it meets every way. The other two, which read one row each, take turns; `make
# test-all` has the product.
PAIRS = [
    pytest.param(rows, way, id=f"{rows}-{way}", marks=[pytest.mark.slow] * (rows == ("last", "cls")[i % 2]))
    for i, way in enumerate(WAYS)
    for rows in MODES
]


@pytest.mark.parametrize("rows, way", PAIRS)
def test_embeddings_are_those_of_transformers(folders, wanted, rows, way):
    found = embed_all(folders[rows], **WAYS[way])
    assert len(found) == len(PROMPTS)
    for i, ids in enumerate(PROMPTS):
        np.testing.assert_allclose(found[i], expected(wanted[tuple(ids)], rows), atol=CLOSE, err_msg=f"prompt {i}")


@pytest.mark.parametrize("rows", MODES)
def test_a_prefix_hit_changes_nothing(folders, wanted, rows):
    """The last row is computed behind a cached prefix; a mean is computed in full, since no state is cached."""
    driver = Pooling(folders[rows])
    try:
        for turn in ("cold", "warm"):
            driver.run([driver.ask(turn, PROMPT)])
            np.testing.assert_allclose(driver.vectors[turn], expected(wanted[tuple(PROMPT)], rows), atol=CLOSE)
        assert driver.outputs["warm", 0].num_cached == (LENGTH // PAGE * PAGE if rows == "last" else 0)
        assert driver.outputs["cold", 0].num_cached == 0
    finally:
        driver.close()


def test_prompts_that_begin_alike_share_pages_and_do_not_wait_in_line(folders):
    """The mean of each is computed at once: nobody waits for pages that it may not use."""
    same = [[*PROMPT[:48], 5 + i] for i in range(6)]
    for rows, most in (("last", 4), ("mean", 3)):
        driver = Pooling(folders[rows], max_num_batched_tokens=256)
        try:
            driver.run([driver.ask(str(i), ids) for i, ids in enumerate(same)])
            assert driver.steps <= most
            hits = [driver.outputs[str(i), 0].num_cached for i in range(6)]
            assert hits == ([0] + [48] * 5 if rows == "last" else [0] * 6)
        finally:
            driver.close()


@pytest.mark.parametrize("dimensions", [1, 7, WIDTH - 1, WIDTH])
def test_dimensions_are_cut_before_the_length_is_set(folders, wanted, dimensions):
    found = embed_all(folders["last"], [PROMPT], params=dict(dimensions=dimensions))[0]
    assert len(found) == dimensions and abs(np.linalg.norm(found) - 1) < 1e-6
    np.testing.assert_allclose(found, expected(wanted[tuple(PROMPT)], "last", dimensions), atol=CLOSE)


def test_requests_of_one_step_keep_their_own_parameters(folders, wanted):
    driver = Pooling(folders["last"])
    try:
        asks = {"all": {}, "some": dict(dimensions=5), "raw": dict(use_activation=False, dimensions=9)}
        driver.run([driver.ask(name, PROMPT, **params) for name, params in asks.items()])
        states = wanted[tuple(PROMPT)]
        np.testing.assert_allclose(driver.vectors["all"], expected(states, "last"), atol=CLOSE)
        np.testing.assert_allclose(driver.vectors["some"], expected(states, "last", 5), atol=CLOSE)
        np.testing.assert_allclose(driver.vectors["raw"], states[-1, :9].numpy(), atol=CLOSE)
    finally:
        driver.close()


def test_a_prompt_may_fill_the_context(folders, wanted):
    ids = [3 + i % 90 for i in range(128)]
    found = embed_all(folders["last"], [ids], max_num_batched_tokens=32, overlap=True)[0]
    np.testing.assert_allclose(found, expected(pooling_checkpoints.states(folders["last"], ids), "last"), atol=CLOSE)
    driver = Pooling(folders["last"])
    with pytest.raises(RequestError, match="the prompt has 129 tokens; a context of 128 allows at most 128"):
        driver.ask("long", [*ids, 5])
    driver.close()


# ------------------------------------------------------------------------------------------------- scores of rerankers


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return pooling_checkpoints.classifier(tmp_path_factory.mktemp("reranker") / "model")


def label_score(folder, ids):
    import transformers

    model = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = 96
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].item()


@pytest.mark.parametrize("way", ["alone", "crowd", "odd chunks", "preempted in flight", "pieces in chunks"])
def test_scores_of_a_head_are_those_of_transformers(reranker, way):
    raw = embed_all(reranker, params=dict(use_activation=False), **WAYS[way])
    found = embed_all(reranker, **WAYS[way])
    for i, ids in enumerate(PROMPTS):
        logit = label_score(reranker, ids)
        assert raw[i].shape == (1,) and abs(raw[i][0] - logit) < CLOSE
        assert abs(found[i][0] - 1 / (1 + np.exp(-logit))) < CLOSE


@pytest.mark.parametrize("tied", [True, False])
def test_scores_of_two_tokens_are_their_softmax(tmp_path, tied):
    folder = checkpoints.write(tmp_path / "model", "qwen3", tie_word_embeddings=tied)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (folder / "modules.json").write_text(
        '[{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}, {"path": "1_LogitScore",'
        ' "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]'
    )
    (folder / "1_LogitScore").mkdir()
    for no in (11, None):
        told = "null" if no is None else no
        (folder / "1_LogitScore" / "config.json").write_text(f'{{"true_token_id": 17, "false_token_id": {told}}}')
        found = embed_all(folder, max_num_batched_tokens=24)
        for i, ids in enumerate(PROMPTS):
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1]
            want = logits[[11, 17]].softmax(0)[1] if no else logits[17].sigmoid()
            assert abs(found[i][0] - want.item()) < CLOSE


# --------------------------------------------------------------------------------------------------- negative controls


def test_a_row_early_is_caught(folders, wanted, monkeypatch):
    def early(self, start, stop, num_prompt):
        at = max(0, num_prompt - 2)
        return range(max(start, at), min(stop, at + 1))

    monkeypatch.setattr(PoolingParams, "rows_of", early)
    found = embed_all(folders["last"], [PROMPT])[0]
    assert np.abs(found - expected(wanted[tuple(PROMPT)], "last")).max() > 100 * CLOSE


def test_a_length_set_before_the_cut_is_caught(folders, wanted, monkeypatch):
    monkeypatch.setattr(pooling.Pooler, "_finish", lambda self, spans, sums_KE: F.normalize(sums_KE))
    found = embed_all(folders["last"], [PROMPT], params=dict(dimensions=7))[0]
    assert np.abs(found - expected(wanted[tuple(PROMPT)], "last", 7)).max() > 100 * CLOSE


def test_a_mean_without_its_first_chunk_is_caught(folders, wanted, monkeypatch):
    class Forgetful(dict):
        def __getitem__(self, end):
            return torch.zeros(WIDTH)

    monkeypatch.setattr(pooling.Pooler, "close", lambda self, seat: self._sums.__setitem__(seat, Forgetful()))
    driver = Pooling(folders["mean"], max_num_batched_tokens=32)
    driver.engine.runner.parts.pooler._sums = {seat: Forgetful() for seat in range(8)}
    driver.run([driver.ask("a", PROMPT)])
    assert np.abs(driver.vectors["a"] - expected(wanted[tuple(PROMPT)], "mean")).max() > 10 * CLOSE
    driver.close()


def test_a_mean_behind_a_prefix_hit_is_caught(folders, monkeypatch):
    """A mean that started behind cached pages would lose their rows; the sum to add them to does not exist."""
    driver = Pooling(folders["mean"])
    driver.run([driver.ask("cold", PROMPT)])
    monkeypatch.setattr("kvasir.engine.schedule.start_point.computed_from", lambda seq: None)
    driver.run([driver.ask("warm", PROMPT)])
    assert "warm" in driver.errors and "warm" not in driver.vectors
    driver.close()


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", MODES)
def test_a_step_that_runs_again_adds_nothing_twice(folders, wanted, rows, overlap):
    """Every third launch fails after its sums were launched; its halves run again, and so does what was behind it."""
    driver = Pooling(folders[rows], max_num_batched_tokens=24, overlap=overlap)
    parts, launches = driver.engine.runner.parts, [0]
    before = parts.sample_from

    def failing(spans, hidden_ME):
        handle = before(spans, hidden_ME)
        launches[0] += 1
        if launches[0] % 3 == 0:
            handle.read()
            raise RuntimeError("a planted fault")
        return handle

    parts.sample_from = failing
    try:
        for i, ids in enumerate(PROMPTS):
            driver.submit(driver.ask(str(i), ids))
        while driver.engine.has_work():
            driver.step()
        done = {int(name) for name in driver.vectors}
        assert len(done) + len(driver.errors) == len(PROMPTS) and len(done) >= 3
        for i in done:
            np.testing.assert_allclose(driver.vectors[str(i)], expected(wanted[tuple(PROMPTS[i])], rows), atol=CLOSE)
    finally:
        del parts.sample_from
        driver.close()


def test_a_vector_that_is_no_number_fails_its_request_alone(folders, wanted):
    driver = Pooling(folders["last"])
    model = driver.engine.runner.model
    with torch.inference_mode():
        model.embed_VE[96] = float("nan")
    driver.run([driver.ask("bad", [5, 96, 7]), driver.ask("good", PROMPT)])
    assert driver.errors["bad"].code == "internal_numeric_error" and driver.errors["bad"].status == 500
    np.testing.assert_allclose(driver.vectors["good"], expected(wanted[tuple(PROMPT)], "last"), atol=CLOSE)
    driver.close()


def test_cancelling_gives_everything_back(folders):
    driver = Pooling(folders["mean"], max_num_batched_tokens=16)
    for i in range(4):
        driver.submit(driver.ask(str(i), PROMPT))
    driver.step()
    driver.step()
    for i in range(4):
        driver._take(driver.engine.cancel(str(i)))
    driver.assert_clean()
    assert not driver.vectors and not driver.engine.runner.parts.pooler._sums
    assert {out.finish_reason for out in driver.outputs.values()} == {"cancelled"}
    driver.close()


def test_sums_do_not_pile_up(folders):
    driver = Pooling(folders["mean"], max_num_batched_tokens=8, overlap=True)
    driver.submit(driver.ask("a", PROMPT))
    most = 0
    while driver.engine.has_work():
        driver.step()
        most = max([most, *map(len, driver.engine.runner.parts.pooler._sums.values())])
    assert 0 < most <= 3 and not driver.engine.runner.parts.pooler._sums
    driver.close()


def test_a_request_of_the_other_kind_is_refused(folders, tmp_path):
    driver = Pooling(folders["last"])
    with pytest.raises(RequestError, match="is an embedding model; it serves /v1/embeddings") as refused:
        admit(PROMPT, SamplingParams(), driver.engine.info, id="a", arrival=0.0)
    assert refused.value.code == "unsupported_task" and refused.value.param == "model"
    info, driver.engine.info.pooling = driver.engine.info.pooling, None
    generating = admit(PROMPT, SamplingParams(), driver.engine.info, id="a", arrival=0.0)
    driver.engine.info.pooling = info
    driver.submit(generating)
    assert driver.errors["a"].code == "unsupported_task" and driver.errors["a"].status == 400
    driver.close()
    folder = checkpoints.write(tmp_path / "model", "qwen3")
    driver = Driver(str(folder), max_model_len=128)
    with pytest.raises(RequestError, match="generates text; .* --task embed"):
        admit_pooling(PROMPT, PoolingParams(), driver.engine.info, id="a", arrival=0.0)
    driver.close()


def test_a_model_that_generates_embeds_when_told_to(tmp_path):
    folder = checkpoints.write(tmp_path / "model", "llama")
    found = embed_all(folder, [PROMPT], task="embed")[0]
    np.testing.assert_allclose(found, expected(pooling_checkpoints.states(folder, PROMPT), "last"), atol=CLOSE)


def test_a_drafter_is_refused(folders):
    with pytest.raises(ConfigError, match="draws no tokens. Leave out --drafter"):
        Driver(str(folders["last"]), drafter="suffix", max_model_len=128)


def test_a_request_and_the_facts_cross_processes(folders, reranker):
    """Over the socket, and through the journal file."""
    for folder in (folders["mean"], reranker):
        driver = Pooling(folder)
        request, info = driver.ask("a", PROMPT, dimensions=None, use_activation=False), driver.engine.info
        assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ModelInfo).pooling == info.pooling
        driver.close()


def test_other_weights_of_the_same_model(folders, tmp_path):
    other = pooling_checkpoints.embedding(tmp_path / "model", seed=5)
    driver = Pooling(folders["last"])
    driver.engine.update_weights(str(other))
    driver.run([driver.ask("a", PROMPT)])
    want = expected(pooling_checkpoints.states(other, PROMPT), "last")
    np.testing.assert_allclose(driver.vectors["a"], want, atol=CLOSE)
    driver.close()
