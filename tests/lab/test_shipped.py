"""The checkpoints in the package: transformers, the lab's own model and kvasir's engine agree on each of them."""

from __future__ import annotations

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.convert.checkpoint import plain_folder
from kvasir.lab import export
from kvasir.lab.sheet import shipped_tokenizer
from kvasir.lab.task import load_task
from kvasir.models import checkpoint

TASKS = ("chain", "path", "judge_pair/countdown", "story")


@pytest.mark.parametrize("name", checkpoint.shipped())
def test_transformers_and_kvasir_agree(name):
    """fp32, 1e-4: logits of the lab's model, and the log-probability of every prompt token as the engine reports it."""
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
