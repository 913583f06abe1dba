"""The page on what works with what says what the code declares; every pair gives the plain tokens or is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kvasir.client.admission import admit
from kvasir.hooks.hook import Gate, Hook
from kvasir.models.checkpoint import resolve
from kvasir.models.families import find_family
from kvasir.models.mtp_fields import QWEN
from kvasir.speculation import heads
from kvasir.speculation.head_kinds.eagle import Eagle, EagleShape
from kvasir.speculation.head_kinds.medusa import Medusa, MedusaShape
from kvasir.speculation.head_kinds.ppd import Prompts, PromptShape
from kvasir.types import Request, SamplingParams
from tests import composition
from tests.composition import FACTORS, MODELS, REFUSED, REQUESTS, SHAPE, VOCAB
from tests.engine.driver import Driver
from tests.hooks import write_hooks
from tests.latents import write_latents
from tests.pairwise import label, pairwise, product
from tests.speculation.blocks import random_block
from tests.speculation.masks import random_masks

OUTPUT = 6
HOOK_SHAPE = SHAPE["num_hidden_layers"], SHAPE["num_attention_heads"], SHAPE["head_dim"], SHAPE["hidden_size"]
# Sets that every model's layers can have.
HOOKS = {
    "turn": Hook("head_out", (0, 1), "rotate:c=-4,gate=soft", Gate(answers=True)),
    "odd": Hook("attn_out", (0,), "add:scale=0.2", Gate(tuple(range(1, VOCAB, 2)))),
    "window": Hook("head_out", (1,), "project:c=-2", Gate(window=(6, 30))),
}
KINDS = {
    "medusa": lambda: Medusa(MedusaShape(SHAPE["hidden_size"], (1,), 2)),
    "eagle": lambda: Eagle(EagleShape(SHAPE["hidden_size"], (0, 1), heads=2, head_dim=16, ffn=32)),
    "ppd": lambda: Prompts(PromptShape(SHAPE["hidden_size"])),
}


@pytest.fixture(scope="module", autouse=True)
def every_model_has_an_mtp_layer():
    """The drafter ``mtp`` runs with every model, although only some families publish the layer that it needs."""
    with pytest.MonkeyPatch.context() as patch:
        for config in MODELS.values():
            patch.setattr(find_family(config["model_type"]), "MTP", QWEN, raising=False)
        yield


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_what_the_code_says():
    assert composition.PAGE.read_text() == composition.page(), "write it again: python -m tests.composition"


@pytest.mark.parametrize("what", REFUSED, ids=" with ".join)
def test_what_is_refused_says_why(what):
    """The message names the thing at fault and gives a reason, or an alternative."""
    message = composition.refusal(REFUSED[what])
    assert message and len(message.split()) > 5, message


# ----------------------------------------------------------------------------------------------------------- every pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Folders by name: models of dummy weights, which are a config.json, and random heads for them."""
    root = tmp_path_factory.mktemp("composition")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    target = {
        "name": "any",
        "hidden_size": SHAPE["hidden_size"],
        "vocab_size": VOCAB,
        "num_layers": SHAPE["num_hidden_layers"],
        "weights": "none",
    }
    torch.manual_seed(0)
    for seed, (name, hook) in enumerate(HOOKS.items()):
        write_hooks(root / name, [hook], seed, shape=HOOK_SHAPE)
    for kind, make in KINDS.items():
        head = make()
        with torch.no_grad():
            for p in head.parameters():
                p.normal_(std=0.1)
        heads.write(head, root / kind, target)
    random_block(root / "dflash", SHAPE["hidden_size"], VOCAB, SHAPE["num_hidden_layers"])
    inputs, outputs = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    tensors = {"mask_embedding": torch.randn(inputs)}
    for i in range(SHAPE["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": torch.randn(2, inputs), f"{name}.lora_B.weight": torch.randn(outputs, 2)}
    write_latents(root / "lowrank", [(40, 24), (24, 40)], SHAPE["num_key_value_heads"], SHAPE["head_dim"])
    random_masks(root / "idlm", rank=2, tensors=tensors, target=target)
    return {path.name: str(path) for path in root.iterdir()}


def driver(case: dict, folders: dict[str, str], **options) -> Driver:
    spec = case["drafter"]
    folder = folders[case["model"] if spec == "draft_model" else spec] if spec in composition.NEEDS_FOLDER else ""
    if folder:
        spec = f"{spec}:model={folder}"
    spec = "" if spec == "none" else spec.replace("layer_skip", "layer_skip:exits=1")
    codec = case["codec"]
    return Driver(
        folders[case["model"]],
        hook=tuple(f"{name}={folders[name]}" for name in HOOKS if case["hooks"]),
        load_format="dummy",
        tokenizer="nano",
        max_model_len=96,
        drafter=spec,
        kv_codec=f"{codec}:folder={folders[codec]}" if codec in composition.CODEC_FOLDERS else codec,
        page_slots=None,
        num_pages=64,
        max_draft_tokens=4,
        **options,
    )


def requests(d: Driver) -> list[Request]:
    """One request of each kind. Prompts share their beginnings and repeat themselves."""
    text = [310 + (3 * i) % 7 for i in range(40)]
    found = []
    for k, (name, params) in enumerate(REQUESTS.items()):
        given = dict(max_tokens=OUTPUT, ignore_eos=True, seed=7 + k, logprobs=0) | params
        given["hook"] = [None, *d.engine.info.hooks][k % 4] if d.engine.info.hooks else None
        info = dataclasses.replace(d.engine.info, drafters=())
        found.append(
            admit(
                [*text[: 8 + k], 330 + k],
                SamplingParams(**given),
                info,
                id=name,
                arrival=0.0,
                encode=composition.encode,
                processing=composition.PROCESSING,
            )
        )
    return found


def outputs(d: Driver) -> dict:
    """Everything that a reader gets, to be compared bit for bit."""
    assert not d.errors, d.errors
    assert d.engine.proposals.drafting is None or not d.engine.proposals.drafting._failures, (
        "the drafter failed: see the log"
    )
    return {
        key: (out.tokens, out.logprobs, out.prompt_logprobs, out.score, out.finish_reason)
        for key, out in d.outputs.items()
    }


@pytest.fixture(scope="module")
def reference(folders):
    """Outputs of the plain engine by model, codec and hooks: no drafter, no prefix cache, prompts whole."""
    found: dict[tuple[str, str, bool], dict] = {}

    def get(model: str, codec: str, hooks: bool = False) -> dict:
        if (model, codec, hooks) not in found:
            d = driver(
                {"model": model, "codec": codec, "drafter": "none", "hooks": hooks},
                folders,
                enable_prefix_caching=False,
                max_num_batched_tokens=512,
            )
            d.run(requests(d))
            found[model, codec, hooks] = outputs(d)
            d.close()
        return found[model, codec, hooks]

    return get


def run_case(case: dict, folders, reference) -> int:
    """Run a case against the plain engine; returns the number of accepted tokens."""
    expected = reference(case["model"], case["codec"], case["hooks"])
    d = driver(
        case,
        folders,
        scheduling_policy=case["policy"],
        draft_control=case["control"],
        overlap=case["overlap"],
        static=case["decode over static buffers"],
        enable_prefix_caching=case["prefix cache"],
        max_num_seqs=4 if case["few rows"] else 16,
        max_num_batched_tokens=24 if case["chunked prefill"] else 512,
    )
    if d.engine.proposals.drafting is not None:
        d.engine.proposals.drafting.controller._rest = 0  # drafts from the first step on
    given = requests(d)
    if case["drafter"] == "replay":
        d.engine.proposals.drafting.drafter.load({tuple(r.prompt_ids): expected[r.id, 0][0] for r in given}, 1)
    d.run(given, preempt_every=3 if case["preemption"] else 0)
    assert outputs(d) == expected, case
    accepted = d.engine.stats().accepted_tokens
    d.close()
    return accepted


CASES = pairwise(FACTORS)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_pair_gives_the_plain_tokens(case, folders, reference):
    run_case(case, folders, reference)


def test_drafts_were_right_at_times(folders, reference):
    """If no draft was ever accepted, the cases above would say little about drafters."""
    for name, right in (("replay", True), ("draft_model", True), ("none", False)):
        found = (run_case(case, folders, reference) for case in CASES if case["drafter"] == name)
        assert any(found) == right, name


def test_a_wrong_token_is_seen(folders, reference):
    """The comparison can fail: weights of another seed give other tokens."""
    d = driver({"model": "full attention", "codec": "plain", "drafter": "none", "hooks": False}, folders, seed=1)
    d.run(requests(d))
    assert outputs(d) != reference("full attention", "plain")
    d.close()


def test_hooks_change_what_they_act_on(folders, reference):
    plain, hooked = (reference("full attention", "plain", hooks) for hooks in (False, True))
    differ = [name for name, _ in plain if plain[name, 0] != hooked[name, 0]]
    assert len(differ) >= 3 * len(REQUESTS) // 4 - 2, differ


CORE = ("drafter", "codec", "model", "chunked prefill", "preemption", "few rows")


@pytest.mark.slow
@pytest.mark.parametrize("place, case", list(enumerate(product({name: FACTORS[name] for name in CORE}))), ids=str)
def test_the_product_gives_the_plain_tokens(place, case, folders, reference):
    """Each case of the core factors is run with values of the other factors, which take turns."""
    run_case(
        case | {name: values[place % len(values)] for name, values in FACTORS.items() if name not in CORE},
        folders,
        reference,
    )


def test_the_dummy_models_speak_the_tokenizer(folders):
    from kvasir.models.tokenizer import Tokenizer

    assert Tokenizer.load(resolve("nano")).size <= VOCAB
