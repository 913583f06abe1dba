"""Formats of weights as one more axis of what composes: with any drafter, codec, adapter or set of hooks, the tokens
are those of the plain engine over the same format."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from kvasir.client.admission import admit
from kvasir.hooks.hook import Gate, Hook
from kvasir.types import Request, SamplingParams
from tests import composition
from tests.composition import MODELS, REQUESTS, SHAPE, WEIGHTS
from tests.engine.driver import Driver
from tests.hooks import write_hooks
from tests.pairwise import label, pairwise

LAYERS, HEADS, DIM, WIDTH = (
    SHAPE[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size")
)
HOOK = Hook("head_out", (0, 1), "rotate:c=-4,gate=soft", Gate(answers=True))
ASKED = {name: REQUESTS[name] for name in ("greedy", "T = 1", "grammar", "prompt logprobs")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    write_hooks(root / "turn", [HOOK], 0, shape=(LAYERS, HEADS, DIM, WIDTH))
    torch.manual_seed(0)
    tensors = {}
    for i in range(LAYERS):
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_"
        tensors |= {name + "A.weight": torch.randn(4, WIDTH), name + "B.weight": torch.randn(HEADS * DIM, 4)}
    (root / "x").mkdir()
    save_file(tensors, root / "x" / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (root / "x" / "adapter_config.json").write_text(json.dumps(about))
    return {path.name: str(path) for path in root.iterdir()}


def run(case: dict, folders: dict[str, str], **options) -> dict:
    d = Driver(
        folders[case["model"]],
        load_format="dummy",
        tokenizer="nano",
        max_model_len=96,
        num_pages=64,
        page_slots=None,
        weights=case["weights"],
        kv_codec=case["codec"],
        hook=(f"turn={folders['turn']}",) if case["hooks"] else (),
        **(dict(enable_lora=True, lora_modules=(f"x={folders['x']}",)) if case["adapters"] else {}),
        **options,
    )
    made = {w.format.name for w in d.engine.runner.model.weights()}
    assert case["weights"].split(":")[0] in made, made
    d.run(requests(d, case), preempt_every=3 if options.get("drafter") is not None and case["preemption"] else 0)
    assert not d.errors, d.errors
    found = {key: (out.tokens, out.logprobs, out.prompt_logprobs) for key, out in d.outputs.items()}
    d.close()
    return found


def requests(d: Driver, case: dict) -> list[Request]:
    found, info = [], dataclasses.replace(d.engine.info, drafters=())
    for k, (name, params) in enumerate(ASKED.items()):
        given = dict(max_tokens=6, ignore_eos=True, seed=7 + k, logprobs=0) | params
        given["hook"] = "turn" if case["hooks"] and k % 2 else None
        prompt = [*(310 + (3 * i) % 7 for i in range(12 + k)), 330 + k]
        adapter = "x" if case["adapters"] and k < 2 else None
        options = dict(id=name, arrival=0.0, encode=composition.encode, processing=composition.PROCESSING)
        found.append(admit(prompt, SamplingParams(**given), info, adapter=adapter, **options))
    return found


CASES = pairwise(WEIGHTS)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=label(c), marks=[pytest.mark.slow] * (i % 6 > 0)) for i, c in enumerate(CASES)]
)
def test_every_pair_gives_the_plain_tokens(case, folders):
    want = run(case, folders, enable_prefix_caching=False, max_num_batched_tokens=512)
    drafter = {"none": "", "layer_skip": "layer_skip:exits=1"}.get(case["drafter"], case["drafter"])
    options = dict(enable_prefix_caching=case["prefix cache"], max_num_batched_tokens=24, max_draft_tokens=4)
    assert run(case, folders, drafter=drafter, **options) == want


def test_another_format_gives_other_tokens(folders):
    """The comparison can fail."""
    case = dict.fromkeys(("codec", "weights"), "plain") | {"model": "full attention", "hooks": False, "adapters": False}
    plain, coded = (run(case | {"weights": spec}, folders) for spec in ("plain", "u4:group=0"))
    assert plain != coded
