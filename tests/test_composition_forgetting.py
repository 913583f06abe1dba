"""KV policies as one more axis of what composes: with any drafter, codec, model, chunk size and way to run steps, the
tokens are those of the plain engine under the same policy."""

from __future__ import annotations

import json

import pytest

from kvasir.hooks.hook import Gate, Hook
from tests import composition
from tests.composition import FORGETTING, MODELS, SHAPE
from tests.engine.driver import Driver
from tests.hooks import write_hooks
from tests.pairwise import label, pairwise
from tests.test_composition import outputs, requests

HOOK = Hook("head_out", (0, 1), "rotate:c=-4,gate=soft", Gate(answers=True))
WIDTHS = tuple(SHAPE[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("forgetting")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    write_hooks(root / "turn", [HOOK], 0, shape=WIDTHS)
    return {path.name: str(path) for path in root.iterdir()}


def driver(case: dict, folders: dict[str, str], **options) -> Driver:
    return Driver(
        folders[case["model"]],
        load_format="dummy",
        tokenizer="nano",
        max_model_len=96,
        page_slots=8,
        num_pages=128,
        kv_policy=case["kv policy"],
        kv_codec=case["codec"],
        hook=tuple(f"{name}={folders['turn']}" for name in ("a", "b", "c") if case["hooks"]),
        **options,
    )


@pytest.fixture(scope="module")
def reference(folders):
    """Outputs under a policy by model, codec and hooks: no drafter, no prefix cache, prompts whole."""
    found: dict[tuple, dict] = {}

    def get(case: dict) -> dict:
        key = tuple(case[name] for name in ("kv policy", "model", "codec", "hooks"))
        if key not in found:
            d = driver(case, folders, enable_prefix_caching=False, max_num_batched_tokens=512)
            d.run(requests(d))
            assert d.engine.stats().forgotten_tokens or case["kv policy"] == "off"
            found[key] = outputs(d)
            d.close()
        return found[key]

    return get


def run_case(case: dict, folders, expected: dict) -> int:
    drafter = "" if case["drafter"] == "none" else case["drafter"].replace("layer_skip", "layer_skip:exits=1")
    d = driver(
        case,
        folders,
        drafter=drafter,
        max_draft_tokens=4,
        draft_control="fixed",
        overlap=case["overlap"],
        static=case["decode over static buffers"],
        enable_prefix_caching=case["prefix cache"],
        max_num_seqs=4 if case["few rows"] else 16,
        max_num_batched_tokens=24 if case["chunked prefill"] else 512,
    )
    given = requests(d)
    if case["drafter"] == "replay":
        d.engine.proposals.drafting.drafter.load({tuple(r.prompt_ids): expected[r.id, 0][0] for r in given}, 1)
    d.run(given, preempt_every=3 if case["preemption"] else 0)
    assert outputs(d) == expected, case
    accepted = d.engine.stats().accepted_tokens
    d.close()
    return accepted


CASES = pairwise(FORGETTING)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_pair_gives_the_tokens_of_its_policy(case, folders, reference):
    run_case(case, folders, reference(case))


def test_policies_give_other_tokens(folders, reference):
    """Comparing a policy with itself would say nothing if it never acted."""
    base = {"model": "full attention", "codec": "plain", "hooks": False}
    dense = reference(base | {"kv policy": "off"})
    differ = [spec for spec in composition.FORGETTING["kv policy"] if reference(base | {"kv policy": spec}) != dense]
    assert len(differ) == len(composition.FORGETTING["kv policy"])


def test_drafts_were_right_at_times(folders, reference):
    replays = [case for case in CASES if case["drafter"] == "replay"]
    assert any(run_case(case, folders, reference(case)) for case in replays)
