"""The packaged checkpoints: transformers, the lab's model and the engine agree on them, and their cards are true."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.convert.checkpoint import plain_folder
from kvasir.models import checkpoint
from kvasir_lab import export
from kvasir_lab.drafters.card import card as drafter_card
from kvasir_lab.lookup import load_task
from kvasir_lab.tokenizer import shipped_tokenizer
from kvasir_lab.training.card import card
from kvasir_lab.training.recipe import find

TASKS = ("chain", "path", "judge_pair/countdown", "story")


@pytest.mark.parametrize("name", checkpoint.shipped())
def test_transformers_and_kvasir_agree(name):
    """Compare in fp32, to 1e-4.

    Logits of the lab's model, and the log-probability of every prompt token as the engine reports it.
    """
    transformers = pytest.importorskip("transformers")
    folder, tokenizer = checkpoint.resolve(name), shipped_tokenizer()
    texts = [p.prompt + p.solution for task in TASKS for p in load_task(task).problems("test", 3, 2)]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain_folder(folder), dtype=torch.float32).eval()
    ours = export.load(folder)
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=1024, cpu_cache_bytes=1 << 26) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        )
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(ours(torch.tensor([ids]))[0], wanted, atol=1e-4, rtol=1e-4)
        told = torch.tensor([output.prompt_logprobs[i][token].logprob for i, token in enumerate(ids) if i])
        torch.testing.assert_close(
            told, wanted[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=1e-4
        )


ASSETS = Path(str(files("kvasir"))) / "assets"


@pytest.mark.parametrize("name", checkpoint.shipped())
def test_the_card_of_a_model_is_what_the_generator_writes(name):
    folder = checkpoint.resolve(name)
    record = json.loads((folder / "training.json").read_text())
    assert (folder / "README.md").read_text() == card(find(name), record)


@pytest.mark.parametrize("folder", sorted((ASSETS / "drafters").iterdir()), ids=lambda f: f.name)
def test_the_card_of_a_drafter_is_what_the_generator_writes(folder):
    record = json.loads((folder / "training.json").read_text())
    assert (folder / "README.md").read_text() == drafter_card(record)
