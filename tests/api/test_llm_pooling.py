"""``LLM.embed`` and ``LLM.score``, from text to numbers: those of transformers with the same tokenizer and pooling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import processors

from kvasir import LLM, PoolingParams, SamplingParams
from kvasir.errors import RequestError
from kvasir.models.families import find_family
from tests import checkpoints, pooling_checkpoints
from tests.models.small_tokenizers import byte_level

SMALL = dict(page_slots=16, num_pages=72, max_num_batched_tokens=24, num_threads=1, check=True)
TEXTS = ["The quick brown fox", "Hello there, world!", "naïve café <|im_end|>", "I am fine. " * 9]
PROMPTS = {"query": "Hello there: ", "document": ""}
CLOSE = 1e-4


def add_tokenizer(folder, *words):
    """A byte-level tokenizer that ends every text with </s>, as that of Qwen3-Embedding does with its own end."""
    backend = byte_level()
    backend.add_tokens(list(words))
    end = backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", end)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return backend


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = pooling_checkpoints.embedding(tmp_path_factory.mktemp("e") / "m", prompts=PROMPTS, vocab_size=512)
    add_tokenizer(folder)
    with LLM(str(folder), **SMALL) as llm:
        yield llm, folder


def wanted(llm, folder, text):
    ids = llm.get_tokenizer().prompt_ids(text)
    return F.normalize(pooling_checkpoints.states(folder, ids)[-1], dim=0).numpy()


def test_embeddings_of_texts(embedder):
    llm, folder = embedder
    outputs = llm.embed(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, wanted(llm, folder, text), atol=CLOSE)
        assert output.prompt_token_ids[-1] == llm.get_tokenizer().token_to_id("</s>") and output.finished
    again = llm.embed({"prompt_token_ids": outputs[3].prompt_token_ids})[0]
    np.testing.assert_allclose(again.outputs.embedding, outputs[3].outputs.embedding, atol=CLOSE)
    assert again.num_cached_tokens > 0 == outputs[3].num_cached_tokens


def test_prompts_dimensions_and_cutting(embedder):
    llm, folder = embedder
    found = llm.embed("fox", PoolingParams(dimensions=8), prompt_name="query")[0].outputs.embedding
    whole = wanted(llm, folder, PROMPTS["query"] + "fox")[:8]
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), atol=CLOSE)
    cut = llm.embed(TEXTS[3], truncate_prompt_tokens=6)[0]
    ids = llm.get_tokenizer().prompt_ids(TEXTS[3])
    assert cut.prompt_token_ids == [*ids[:5], ids[-1]]
    for bad, param in ((PoolingParams(dimensions=33), "dimensions"), ("words", "pooling_params")):
        with pytest.raises(RequestError) as refused:
            llm.embed("fox", bad)
        assert refused.value.param == param


def test_scores_of_an_embedding_model(embedder):
    llm, folder = embedder
    a, b = wanted(llm, folder, TEXTS[0]), wanted(llm, folder, TEXTS[1])
    scores = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS[:2])]
    assert scores == pytest.approx([1.0, float(a @ b)], abs=CLOSE)


def test_the_other_calls_say_which_ones_work(embedder):
    llm, _ = embedder
    for call in (lambda: llm.generate("a", SamplingParams()), lambda: next(llm.stream("a"))):
        with pytest.raises(RequestError, match="is an embedding model") as refused:
            call()
        assert refused.value.code == "unsupported_task"
    with LLM("nano", max_model_len=64, num_threads=1, num_pages=32, page_slots=16) as other:
        for call in (lambda: other.embed("a"), lambda: other.score("a", "b")):
            with pytest.raises(RequestError, match="generates text"):
                call()


@pytest.mark.parametrize("kind", ["tokens", "head"])
def test_rerankers(tmp_path, kind):
    """A Qwen3 reranker, as published and converted: the probability of yes behind the family's text."""
    template = find_family("qwen3").RERANKER.template
    folder = tmp_path / "Tiny-Reranker"
    if kind == "tokens":
        checkpoints.write(folder, "qwen3", vocab_size=512, max_position_embeddings=1024)
    else:
        pooling_checkpoints.classifier(folder, vocab_size=512, max_position_embeddings=1024)
    backend = add_tokenizer(folder, "no", "yes")
    no, yes = (backend.token_to_id(word) for word in ("no", "yes"))
    documents = ["The lazy dog", "How are you today?"]
    with LLM(str(folder), **SMALL) as llm:
        outputs = llm.score("quick fox", documents, instruction="Hello")
        default = llm.score("quick fox", documents[0])[0]
        raw = llm.score(
            "quick fox", documents[0], instruction="Hello", pooling_params=PoolingParams(use_activation=False)
        )
    for document, output in zip(documents, outputs, strict=True):
        text = template.before + template.pair.format(instruction="Hello", query="quick fox", document=document)
        ids = backend.encode(text + template.after, add_special_tokens=False).ids
        assert output.prompt_token_ids == ids
        states = pooling_checkpoints.states(folder, ids)[-1]
        if kind == "tokens":
            import transformers

            head = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
            score = (head.detach() @ states)[[no, yes]].softmax(0)[1].item()
        else:
            import transformers

            model = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            score = (model.score.weight.detach()[0] @ states).sigmoid().item()
        assert abs(output.outputs.score - score) < CLOSE
    logit = np.log(outputs[0].outputs.score / (1 - outputs[0].outputs.score))
    assert abs(raw[0].outputs.score - logit) < 1e-3 and default.outputs.score != outputs[0].outputs.score
