"""Any drafter gives the tokens and log-probabilities of the plain engine, to the bit (CPU exact mode)."""

from __future__ import annotations

import json
import shutil
from itertools import cycle

import pytest

from kvasir.engine.ways.capture import call_through
from kvasir.errors import RequestError
from kvasir.models.checkpoint import read_config, resolve
from kvasir.models.families import find_family
from kvasir.models.mtp_fields import QWEN
from kvasir.types import Grammar
from tests.engine.driver import use_ways
from tests.mtp_checkpoints import with_random_layer
from tests.pairwise import label, pairwise, product
from tests.speculation.blocks import random_block
from tests.speculation.helpers import LENGTHS, Hostile, WithGuests, driver, install, outputs, plain, requests
from tests.speculation.masks import random_masks
from tests.speculation.published import random_published
from tests.speculation.trained import random_head

FACTORS = {
    "drafter": [
        "ngram:min_match=1",
        "suffix:min_match=1",
        "draft_model:model=embedded",
        "draft_model:model=embedded,tree=dyspec,max_depth=5",
        "token_recycling",
        "token_recycling:tree=published",
        "layer_skip:exits=1+2",
        "ngram:min_match=1+suffix+layer_skip",
        "replay:accept=0.7",
        "hostile",
        "guests",
        "medusa",
        "eagle",
        "eagle published",
        "dflash",
        "ppd",
        "idlm",
        "suffix:min_match=1+idlm",
        "mtp",
        "mtp:tree=dyspec+suffix:min_match=1",
    ],
    "temperature": [0.0, 0.7, 1.0],
    "chunk": [6, 17, 64],
    "cache": [True, False],
    "preempt_every": [0, 3],
    "pool": ["roomy", "tight"],
    "n": [1, 2],
    "codec": ["plain", "int4_bdr"],
    "seqs": [1, 4],
    "overlap": [True, False],
    "static": [True, False],  # decodes and chains over the static buffers that a GPU captures
    "logprobs": [None, 0],  # with them, the sampler draws; without, the step itself
    "params": ["none", "penalties", "grammar"],
    "control": ["fixed", "goodput", "length", "optimal"],
}
# Weights that mean nothing; ``test_heads.py``, ``test_published.py`` and ``test_dflash.py`` have trained ones.
RANDOM = ("medusa", "eagle", "eagle published", "dflash", "ppd", "idlm", "mtp")
PARAMS = {
    "none": {},
    "penalties": dict(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "grammar": dict(grammar=Grammar("regex", "(ab|ba|c)*"), allowed_token_ids=None),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, str]:
    """Return the specs of drafters with random weights, and the model that has an MTP layer."""
    root = tmp_path_factory.mktemp("random")
    ours = [kind for kind in RANDOM if kind not in ("idlm", "dflash", "eagle published", "mtp")]
    found = {kind: f"{kind}:model={random_head(kind, root / kind)}" for kind in ours}
    found["eagle published"] = f"eagle:model={random_published(root / 'published')}"
    shape = read_config(resolve("nano"))
    sizes = shape["hidden_size"], shape["vocab_size"], shape["num_hidden_layers"]
    found["dflash"] = f"dflash:model={random_block(root / 'dflash', *sizes)}"
    masks = f"idlm:model={random_masks(root / 'idlm')}"
    found["model"] = str(with_random_layer(resolve("nano"), root / "mtp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_family("qwen3"), "MTP", QWEN, raising=False)
        yield found | {"idlm": masks, "suffix:min_match=1+idlm": f"suffix:min_match=1+{masks}"}


@pytest.fixture(scope="module")
def reference():
    """Return the plain engine's outputs by (temperature, n, codec, params), computed on first use."""
    found = {}

    def get(temperature, n, codec, params="none") -> dict:
        key = temperature, n, codec, params
        if key not in found:
            found[key] = plain(temperature, n, codec, **PARAMS[params])
        return found[key]

    return get


def run_case(case: dict, reference, heads: dict[str, str]) -> tuple[int, int]:
    """Run a case. Returns the numbers of drafted and accepted tokens."""
    expected = reference(case["temperature"], case["n"], case["codec"], case["params"])
    num_pages = 256 if case["pool"] == "roomy" else 8  # the longest request and little more
    name = case["drafter"]
    d = driver(
        "replay" if name in ("hostile", "guests") else heads.get(name, name),
        **({"model": heads["model"]} if name.startswith("mtp") else {}),
        max_num_batched_tokens=case["chunk"],
        max_num_seqs=case["seqs"],
        num_pages=num_pages,
        enable_prefix_caching=case["cache"],
        kv_codec=case["codec"],
        overlap=case["overlap"],
        static=case["static"],
        draft_control=case["control"],
    )
    d.engine.proposals.drafting.controller._rest = 0  # from the first step on
    if name == "hostile":
        install(d, Hostile({key: tokens for key, (tokens, _) in expected.items()}))
    elif name == "guests":
        install(
            d,
            WithGuests({key: tokens for key, (tokens, _) in expected.items()}, d.engine.runner.model.spec.hidden_size),
        )
    elif name.startswith("replay"):
        prompts = {r.id: tuple(r.prompt_ids) for r in requests(d, 0.0)}
        d.engine.proposals.drafting.drafter.load(
            {prompts[i]: tokens for (i, branch), (tokens, _) in expected.items() if branch == 0}, 1
        )
    elif name.startswith("layer_skip"):  # by itself it drafts nothing for so small a model
        turns = cycle([(1, 3), (2, 2)])
        d.engine.proposals.drafting.drafter._choose = lambda seqs: next(turns)
    given = requests(d, case["temperature"], case["n"], **{"logprobs": case["logprobs"]} | PARAMS[case["params"]])
    d.run(given, preempt_every=case["preempt_every"])
    if case["logprobs"] is None:
        expected = {key: (tokens, []) for key, (tokens, _) in expected.items()}
    assert outputs(d) == expected, case
    stats = d.engine.stats()
    assert not d.engine.proposals.drafting._failures
    if name == "guests":
        heard_by[case["control"]] = heard_by.get(case["control"], 0) + d.engine.proposals.drafting.drafter.rows
    d.close()
    return stats.drafted_tokens, stats.accepted_tokens


CASES = pairwise(FACTORS)
accepted_by: dict[str, int] = {}
drafted_by: dict[str, int] = {}
ran: list[dict] = []
heard_by: dict[str, int] = {}  # by control: outputs of guests


@pytest.mark.parametrize("case", CASES, ids=label)
def test_same_tokens(case, reference, heads):
    drafted, accepted = run_case(case, reference, heads)
    drafted_by[case["drafter"]] = drafted_by.get(case["drafter"], 0) + drafted
    ran.append(case)
    accepted_by[case["drafter"]] = accepted_by.get(case["drafter"], 0) + accepted


def test_every_drafter_was_right_at_times():
    """Drafts were verified in the cases above; otherwise they compared the plain engine with itself."""
    if len(ran) < len(CASES):
        pytest.skip("only meaningful after all cases in one process")
    assert all(drafted_by.values()), drafted_by
    assert all(count for name, count in accepted_by.items() if name not in RANDOM), accepted_by
    assert heard_by["fixed"] > 10, heard_by  # a single case, whose steps of six rows leave guests little room


CORE = ("drafter", "temperature", "chunk", "cache", "preempt_every", "params", "codec")


@pytest.mark.slow
@pytest.mark.parametrize("place, case", list(enumerate(product({name: FACTORS[name] for name in CORE}))), ids=str)
def test_same_tokens_full_product(place, case, reference, heads):
    """Yield every combination of these factors; the other factors take turns."""
    run_case(
        case | {name: values[place % len(values)] for name, values in FACTORS.items() if name not in CORE},
        reference,
        heads,
    )


HISTORY = {
    "penalties": dict(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "stops": dict(bad_words=(), min_tokens=6, stop_token_ids=[311, 312], ignore_eos=False),
    "reports": dict(logprobs=3, logprobs_mode="processed", top_p=0.9, top_k=20),
    "scored": dict(prompt_logprobs=1),
    "grammar": dict(grammar=Grammar("regex", "(ab|ba|c)*"), allowed_token_ids=None),
}
# Every pair of parameters, temperature and guests; the other half of the product is for `make test-all`.
HISTORIES = [
    pytest.param(params, t, guests, id=f"{guests}-{t}-{name}", marks=[pytest.mark.slow] * ((i + int(t) + guests) % 2))
    for i, (name, params) in enumerate(HISTORY.items())
    for t in (0.0, 1.0)
    for guests in (False, True)
]


@pytest.mark.parametrize("params, temperature, guests", HISTORIES)
def test_with_parameters_that_look_at_history(params, temperature, guests):
    """Each node is conditioned on its own path: penalties, bans, masks and reports equal those of plain decoding."""
    expected = plain(temperature, 2, "plain", **params)
    d = driver("replay", max_num_batched_tokens=96 if guests else 32, max_num_seqs=4)
    told = {key: tokens for key, (tokens, _) in expected.items()}
    install(d, WithGuests(told, d.engine.runner.model.spec.hidden_size) if guests else Hostile(told))
    d.run(requests(d, temperature, 2, **params), preempt_every=5)
    assert outputs(d) == expected
    assert d.engine.stats().accepted_tokens > 20
    d.close()


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4_bdr:rotate_v=true", "nvfp4"])
def test_trees_move_codes_and_scales(codec):
    """Pages have the codec's own size, and slots move within a page and across pages."""
    expected = plain(1.0, 2, codec, max_tokens=24)
    d = driver("replay", kv_codec=codec, page_slots=None, num_pages=24, max_num_batched_tokens=40, max_num_seqs=4)
    install(d, Hostile({key: tokens for key, (tokens, _) in expected.items()}))
    d.run(requests(d, 1.0, 2, max_tokens=24), preempt_every=5)
    assert outputs(d) == expected
    assert d.engine.runner.pool.page_slots in (32, 64) and d.engine.stats().accepted_tokens > 20
    d.close()


def test_a_request_may_do_without():
    d = driver("suffix:min_match=1")
    d.run(requests(d, 0.0, num_draft_tokens=0))
    assert d.engine.stats().drafts == 0
    d.run(requests(d, 0.0, tag="one", num_draft_tokens=1))
    stats = d.engine.stats()
    assert 0 < stats.drafted_tokens == stats.drafts
    d.close()


def test_steps_of_more_rows_than_sequences_run_over_static_buffers():
    """One sequence and its drafts take up to nine rows: a bucket of its own, captured when the engine is idle."""
    d = driver("replay", max_num_seqs=1)
    use_ways(d.engine.runner, call_through, 8)
    expected = plain(0.0)
    prompts = {r.id: tuple(r.prompt_ids) for r in requests(d, 0.0)}
    d.engine.proposals.drafting.drafter.load({prompts[i]: tokens for (i, _), (tokens, _) in expected.items()}, 1)
    d.run(requests(d, 0.0, logprobs=None))
    assert {key: tokens for key, (tokens, _) in outputs(d).items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }
    graphs = d.engine.runner.graphs
    assert (
        graphs.most_drafted == 9
        and max(size for size, draws, drafted in {*graphs.choice._uses, *graphs._ready} if draws and drafted) >= 8
    )
    while d.engine.idle():
        pass
    assert set(graphs._ready) >= {(1, True, False), (2, True, True), (8, True, True), (9, True, True)}
    assert (8, True, False) not in graphs._ready, "decodes alone never are so many"
    d.close()


def test_a_request_may_choose_its_drafter():
    d = driver("suffix:min_match=1+token_recycling")
    d.run(requests(d, 0.0, drafter="token_recycling"))
    assert set(d.engine.stats().drafted_by) == {"token_recycling"}
    d.run(requests(d, 0.0, tag="two", drafter="suffix"))
    assert set(d.engine.stats().drafted_by) == {"token_recycling", "suffix"}
    with pytest.raises(RequestError, match="these do: suffix, token_recycling"):
        requests(d, 0.0, drafter="ngram")
    d.close()


def test_a_draft_model_of_a_shorter_context_drafts_as_far_as_it_goes(tmp_path):
    folder = shutil.copytree(resolve("nano"), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    d = driver(f"draft_model:model={folder}")
    request = d.request("r", list(range(300, 350)), max_tokens=40, temperature=0.0, ignore_eos=True)
    d.run([request])
    assert d.engine.proposals.drafting.drafter._model.info.max_model_len == 64 < d.engine.info.max_model_len
    assert 5 < d.engine.stats().accepted_tokens <= 14 and len(d.outputs["r", 0].tokens) == 40, "and then without drafts"
    d.close()


def test_a_draft_model_goes_on_from_committed_tokens_only():
    """The same over static buffers, where the device has the tokens that it drew, accepted or not."""
    accepted = []
    for static in (False, True):
        d = driver("draft_model:model=embedded,max_depth=1", max_num_seqs=4)
        if static:
            use_ways(d.engine.proposals.drafting.drafter._model._runner, call_through)
        d.run(requests(d, 0.0, 2, max_tokens=40))
        accepted.append(d.engine.stats().accepted_by_depth)
        d.close()
    assert accepted[0] == accepted[1] and accepted[0][0][1] < accepted[0][0][0]


def test_a_drafter_that_fails_costs_no_request(reference):
    class Broken(Hostile):
        def propose(self, asks):
            raise RuntimeError("no")

    d = driver("replay")
    install(d, Broken({}))
    d.run(requests(d, 1.0))
    assert outputs(d) == reference(1.0, 1, "plain")
    d.close()


@pytest.mark.parametrize("guests", [False, True])
def test_a_prefix_of_drafted_text_is_hit_later(guests, reference):
    """Pages with moved slots and former guests serve another request to the bit."""
    expected = reference(1.0, 1, "plain")
    d = driver("replay")
    told = {key: tokens for key, (tokens, _) in expected.items()}
    install(d, WithGuests(told, d.engine.runner.model.spec.hidden_size) if guests else Hostile(told))
    first = requests(d, 1.0)
    d.run(first)
    longer = [
        d.request(f"again{k}", [*r.prompt_ids, *expected[r.id, 0][0]], max_tokens=1, temperature=0.0, logprobs=5)
        for k, r in enumerate(first)
    ]
    bare = driver(enable_prefix_caching=False)
    bare.run(longer)
    d.engine.proposals.drafting.drafter.outputs |= {(f"again{k}", 0): [] for k in range(len(longer))}
    before = d.engine.stats().cached_tokens
    d.run(longer)
    assert d.engine.stats().cached_tokens - before > sum(LENGTHS) // 2
    found = outputs(d)
    assert {k: found[k] for k in outputs(bare)} == outputs(bare)
    d.close()
    bare.close()
