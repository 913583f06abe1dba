"""Hooks of mixed steps: closed gates change no bit, and a request's tokens do not depend on what runs beside it."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.errors import ConfigError, RequestError
from kvasir.hooks.hook import Gate, Hook, Made
from kvasir.kernels.steer import MAX_HOOKS
from kvasir.models import checkpoint
from kvasir.models.hooks import fingerprint
from kvasir.types import HOOK_SHIFT, Request, SamplingParams, Sequence, Span, StepBatch, Variant
from tests.adapters import write_adapter
from tests.engine.driver import Driver, Output, use_ways
from tests.hooks import DIM, HEADS, LAYERS, WIDTH, some_sets, write_hooks

TEXT = [3 + 7 * i % 500 for i in range(60)]
NEVER = Gate(window=(400, 401))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hooks")
    sets = some_sets(root)
    for site in ("head_out", "attn_out", "resid"):
        hooks = [Hook(site, tuple(range(LAYERS)), "rotate:c=-4", NEVER)]
        sets[f"closed_{site}"] = write_hooks(root / f"closed_{site}", hooks)
    sets["recorder"] = write_hooks(
        root / "recorder", [Hook(site, (1, LAYERS - 1), "record") for site in ("head_out", "attn_out", "resid")]
    )
    return sets


def serving(folders, names=None, **options) -> Driver:
    sets = tuple(f"{name}={folders[name]}" for name in names or list(folders))
    return Driver(**{"hook": sets} | options)


def request(d: Driver, id: str, name: str, prompt=TEXT, **params):
    params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True} | params
    return d.request(id, list(prompt), hook=name or None, **params)


def scored(d: Driver, asked, **params) -> list[torch.Tensor]:
    """Log-probabilities of each prompt's tokens and of one answer, from one batch."""
    d.run(
        [
            request(d, str(i), name, prompt_logprobs=0, max_tokens=6, logprobs=0, **params)
            for i, name in enumerate(asked)
        ]
    )
    outs = [d.outputs[str(i), 0] for i in range(len(asked))]
    found = [torch.tensor([p.logprob for p in [*o.prompt_logprobs[1:], *o.logprobs]]) for o in outs]
    d.close()
    return found


# ---------------------------------------------------------------------------------------------------------- no change

EQUAL = {
    "exact": {},
    "native or tapes": dict(batch_invariant=False),
    "layer by layer": dict(batch_invariant=False, fused_kernels=False),
    "captured": dict(static=True, pieces=True, overlap=True, max_num_seqs=8),
}


@pytest.mark.parametrize("way", ["exact", "captured"])
def test_closed_gates_and_strength_zero_are_bit_equal_to_no_hook(way, folders):
    """All requests in one batch, next to one whose gate is open."""
    names = ["closed_head_out", "closed_attn_out", "closed_resid", "turn", ""]
    plain = scored(Driver(**EQUAL[way]), [""] * 5)
    found = scored(serving(folders, **EQUAL[way]), names)
    for name, a, b in zip(names, plain, found):
        assert torch.equal(a, b) == (name != "turn"), name
    off = scored(serving(folders, **EQUAL[way]), ["turn", "ban"], hook_strength=0)
    assert torch.equal(off[0], plain[0]) and torch.equal(off[1], plain[1])


@pytest.mark.parametrize("way", ["native or tapes", "layer by layer"])
def test_a_closed_gate_is_bit_equal_on_the_same_way(way, folders):
    """Ways of a CPU differ by rounding, so both engines take the one that steps with hooks take."""
    found = []
    for name in ("closed_head_out", "closed_attn_out", "closed_resid"):
        d = serving(folders, ("closed_head_out", "closed_attn_out", "closed_resid"), **EQUAL[way])
        found += scored(d, [name])
    d = serving(folders, ("closed_head_out",), **EQUAL[way])
    d.engine.runner.ways[:] = [w for w in d.engine.runner.ways if "Native" not in type(w).__name__]
    plain = scored(d, [""])[0]
    assert all(torch.equal(plain, one) for one in found)


@pytest.mark.slow
def test_every_set_changes_something_and_strength_changes_it_further(folders):
    names = [name for name in folders if not name.startswith(("closed", "recorder"))]
    plain = scored(serving(folders), [""])[0]
    once, twice = (scored(serving(folders), names, hook_strength=s) for s in (1.0, 2.5))
    for name, a, b in zip(names, once, twice):
        assert (a - plain).abs().max() > 1e-3 and (a - b).abs().max() > 1e-3, name


# ------------------------------------------------------------------------------------------------ whatever runs beside

ASKED = ["turn", "soft", "hard", "push", "ban", "mood", "mood_sigmoid", "both", ""]


def fleet_of(d: Driver, i: int):
    strength = 1.0 + (i % 3) / 2
    return request(
        d, str(i), ASKED[i], TEXT[: 20 + 3 * i], temperature=float(i % 2), seed=i, max_tokens=20, hook_strength=strength
    )


def fleet(d: Driver) -> list:
    return [fleet_of(d, i) for i in range(len(ASKED))]


@pytest.fixture(scope="module")
def alone(folders):
    """The fleet's outputs, each request by itself."""
    d = serving(folders)
    for made in fleet(d):
        d.run([made])
    found = {key: out.tokens for key, out in d.outputs.items()}
    d.close()
    plain = Driver()
    for i in range(len(ASKED)):
        made = fleet_of(d, i)
        made.hook = None
        plain.run([made])
    differ = [plain.outputs[str(i), 0].tokens != found[str(i), 0] for i in range(len(ASKED))]
    assert sum(differ[:-1]) >= len(ASKED) - 3 and not differ[-1], "the hooks change nothing"
    return found


WAYS = {
    "together": {},
    "chunked": dict(max_num_batched_tokens=24),
    "overlap": dict(overlap=True),
    "captured decodes": dict(static=True, overlap=True),
    "captured pieces": dict(pieces=True, overlap=True, max_num_seqs=8, max_num_batched_tokens=64),
    "drafts": dict(drafter="suffix", draft_control="fixed"),
    "captured drafts": dict(drafter="suffix", draft_control="fixed", static=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_token_depends_on_what_runs_beside(way, folders, alone):
    """The prefix cache is on, requests share prefixes, sequences are preempted in mid-answer, and nine sets take turns
    in eight slots that are poisoned in between."""
    options = dict(WAYS[way])
    d = serving(folders, **options)
    if "drafter" in options and "static" in options:
        use_ways(d.engine.runner, call_through, 8)
    d.run(fleet(d), gap=2, preempt_every=5)
    assert {key: out.tokens for key, out in d.outputs.items()} == alone
    if d.engine.proposals.drafting is not None:
        assert d.engine.stats().drafted_tokens > 0
    for way in d.engine.runner.ways:
        if type(way) in (DecodeGraphs, MixedSteps) and way._varied:
            assert way._ready or way._uses if isinstance(way, MixedSteps) else way._used, "no hooked step ran here"
    d.close()


def check_preempted(folders, alone) -> None:
    """Preempt in mid-answer, so that rows which were decodes are computed again as a prompt."""
    d = serving(folders)
    d.run(fleet(d), preempt_every=4)
    assert {key: out.tokens for key, out in d.outputs.items()} == alone, "preempted"
    d.close()


def test_a_gate_on_the_spans_length_fails_the_preemption_test(folders, monkeypatch):
    def by_length(span: Span, out: np.ndarray) -> None:
        """The mutation: hooks act on what is decoded, so a recomputed answer is taken for a prompt."""
        out[:] = span.seq.hook << HOOK_SHIFT if span.length == 1 else 0

    monkeypatch.setattr("kvasir.engine.ways.batch.row_variants", by_length)
    d = serving(folders)
    for made in fleet(d):
        d.run([made])
    mutated = {key: out.tokens for key, out in d.outputs.items()}  # so that only the preemption can differ
    d.close()
    with pytest.raises(AssertionError, match="preempted"):
        check_preempted(folders, mutated)


def test_branches_and_a_replay_have_the_hook(folders, alone):
    d = serving(folders)
    d.run([dataclasses.replace(fleet_of(d, 1), id="n", params=dataclasses.replace(fleet_of(d, 1).params, n=3))])
    many = [d.outputs["n", branch].tokens for branch in range(3)]
    assert many[0] == alone["1", 0] and len({tuple(t) for t in many}) == 3
    for i in (0, 1, 5, 7):  # a process that was killed in mid-answer, and the next one's request
        again = fleet_of(d, i)
        again.id, again.epoch, again.emitted = f"again{i}", 1, [alone[str(i), 0][:7]]
        again = msgspec.convert(msgspec.to_builtins(again), Request)  # as it crosses to the next process
        d.outputs[again.id, 0] = Output(list(again.emitted[0]))
        d.run([again])
        assert d.outputs[again.id, 0].tokens == alone[str(i), 0]
    d.close()


def test_a_hook_and_an_adapter_act_together(folders, tmp_path):
    """An adapter from the first row on, and a hook from the prompt's last row on, in one request."""
    options = dict(
        enable_lora=True,
        max_loras=1,
        lora_modules=tuple(f"{n}={write_adapter(tmp_path / n, seed=i, strength=0.2)}" for i, n in enumerate("ab")),
    )
    found = {}
    for together in (False, True):
        d = serving(folders, ("turn", "ban"), **options)
        asked = []
        for i, (adapter, hook) in enumerate(
            [("a", "turn"), ("b", "ban"), ("a", ""), ("", "turn"), ("", ""), ("a", "ban")]
        ):
            made = request(d, str(i), hook, TEXT[:40], max_tokens=16, hook_strength=8.0, temperature=1.0, seed=5)
            made.variant = Variant(adapter, d.engine.info.adapters[adapter].key) if adapter else None
            asked.append(made)
        for some in [asked] if together else [[one] for one in asked]:
            d.run(some, preempt_every=4 if together else 0)
        found[together] = {key: out.tokens for key, out in d.outputs.items()}
        d.close()
    assert found[True] == found[False]
    assert len({tuple(t) for t in found[True].values()}) == 6, "one of them changes nothing"


# ------------------------------------------------------------------------------------------------------------ prefixes


def after_each_other(folders) -> list[tuple[list[int], int]]:
    d = serving(folders)
    found = []
    for i, (name, strength) in enumerate(
        [("", 1), ("ban", 1), ("hard", 1), ("ban", 1), ("ban", 2), ("turn", 1), ("", 1)]
    ):
        d.run([request(d, str(i), name, TEXT, max_tokens=8, hook_strength=float(strength))])
        found.append((d.outputs[str(i), 0].tokens, d.outputs[str(i), 0].num_cached))
    d.close()
    return found


@pytest.fixture(scope="module")
def fresh(folders) -> list[list[int]]:
    """The outputs of each set without a prefix cache."""
    d = serving(folders, enable_prefix_caching=False)
    sets = [("", 1), ("ban", 1), ("hard", 1), ("ban", 2), ("turn", 1)]
    for i, (name, strength) in enumerate(sets):
        d.run([request(d, str(i), name, TEXT, max_tokens=8, hook_strength=float(strength))])
    d.close()
    return [d.outputs[str(i), 0].tokens for i in range(len(sets))]


def check_prefixes(folders, fresh) -> None:
    found = after_each_other(folders)
    assert [tokens for tokens, _ in found] == [fresh[i] for i in (0, 1, 2, 1, 3, 4, 0)], (
        "another hook's prefix was read"
    )
    # "turn" acts from the prompt's last row on, so it reads what no hook has changed.
    assert [cached for _, cached in found] == [0, 0, 0, 48, 0, 48, 48]


def test_a_prefix_is_for_its_own_hook_and_strength(folders, fresh):
    check_prefixes(folders, fresh)


def test_a_shared_page_key_would_fail(folders, fresh, monkeypatch):
    monkeypatch.setattr(Sequence, "kv_variant", lambda self, end: "")
    with pytest.raises(AssertionError, match="another hook's prefix"):
        check_prefixes(folders, fresh)


def test_an_answer_that_became_a_prompt_is_computed_again(folders):
    """The next turn's prompt holds the answer, whose rows now come before the hook's first position."""
    d = serving(folders, ("turn",))
    d.run([request(d, "first", "turn", TEXT[:30], max_tokens=30)])
    chat = TEXT[:30] + d.outputs["first", 0].tokens + TEXT[30:40]
    d.run([request(d, "next", "turn", chat, max_tokens=8)])
    fresh = serving(folders, ("turn",), enable_prefix_caching=False)
    fresh.run([request(fresh, "next", "turn", chat, max_tokens=8)])
    assert d.outputs["next", 0].tokens == fresh.outputs["next", 0].tokens, "an old answer's pages"
    assert d.outputs["next", 0].num_cached == 16
    d.close(), fresh.close()


def test_a_key_names_the_first_position_and_the_strength():
    """Two prompts that end inside one page, with the same text behind them, have that page apart."""
    first, later, strong = (Variant("x", "k", start, True, s) for start, s in ((33, 1.0), (40, 1.0), (33, 2.0)))
    assert len({variant.kv_key(48) for variant in (first, later, strong)}) == 3
    assert first.kv_key(33) == later.kv_key(40) == "" and Variant("x", "k", 0, False).kv_key(48) == ""
    seq = Sequence(Request(id="r", prompt_ids=[1] * 34, params=SamplingParams(), seed=0, max_tokens=9, hook=first))
    assert seq.kv_variant(33) == "" and seq.kv_variant(34) == " k@33"
    seq.request.variant = Variant("a", "adapter")
    assert seq.kv_variant(33) == "adapter " and seq.kv_variant(34) == "adapter k@33"


# ---------------------------------------------------------------------------------------------------------- recording


def test_record_copies_states_and_changes_none(folders):
    plain = scored(Driver(), [""])[0]
    d = serving(folders, ("recorder",), max_num_batched_tokens=24)
    found = scored(d, ["recorder"])[0]
    assert torch.equal(plain, found)
    slots = d.engine.hooks.slots
    for site, shape in (("head_out", (HEADS, DIM)), ("attn_out", (1, WIDTH)), ("resid", (1, WIDTH))):
        for layer in (1, LAYERS - 1):
            states = slots.recorded(layer, site, list(range(len(TEXT) + 5)))
            assert states.shape[1:] == shape and (states.flatten(1).norm(dim=1) > 0).all(), (site, layer)
    last = slots.recorded(LAYERS - 1, "resid", [len(TEXT) - 2])
    model = d.engine.runner.model
    logits = model.logits(last[:, 0]).float().log_softmax(-1)[0]
    assert abs(logits[TEXT[-1]] - found[len(TEXT) - 2]) < 1e-5


# ------------------------------------------------------------------------------------------------------ CPU, refusals


def test_on_a_cpu_decodes_with_hooks_run_from_tapes_and_others_natively(folders):
    d = serving(folders, ("turn", "mood"), batch_invariant=False)
    native, tapes = (d.engine.runner.way(kind) for kind in (NativeDecodes, DecodeTapes))
    if native is None:
        pytest.skip("no native kernels here")
    ran = {native: [], tapes: []}
    for way in ran:
        run = way.run

        def counted(spans, way=way, run=run):
            ran[way].append({span.seq.request.id for span in spans})
            return run(spans)

        way.run = counted
    d.run([request(d, "plain", "", TEXT[:20], max_tokens=12)])
    d.run(
        [request(d, "hooked", "turn", TEXT[:20], max_tokens=12), request(d, "mood", "mood", TEXT[:20], max_tokens=12)]
    )
    assert {"plain"} in ran[native] and {"hooked", "mood"} in ran[tapes]
    assert not any(ids & {"hooked", "mood"} for ids in ran[native])
    exact = serving(folders, ("turn", "mood"))
    exact.run([request(exact, "hooked", "turn", TEXT[:20], max_tokens=12)])
    assert exact.outputs["hooked", 0].tokens == d.outputs["hooked", 0].tokens
    d.close(), exact.close()


MADE = Made(LAYERS, HEADS, DIM, WIDTH)


@pytest.mark.parametrize(
    "hooks, made, message",
    [
        ([Hook("head_out", (0,), "rotate")], dataclasses.replace(MADE, heads=9), "made for another model: heads 9"),
        ([Hook("head_out", (0,), "rotate")], dataclasses.replace(MADE, hash="ab"), "another model: hash ab"),
        ([Hook("head_out", (LAYERS,), "rotate")], MADE, "layer 4: the model has the layers 0 to 3"),
        ([Hook("head_out", (0,), "rotate", Gate((5000,)))], MADE, "5000 is no token"),
        ([Hook("attn_out", (0,), "add", params=p) for p in "ab"], MADE, "can have one"),
    ],
)
def test_a_set_for_another_model_is_refused_at_the_start(tmp_path, hooks, made, message):
    folder = write_hooks(tmp_path / "x", hooks, made=made)
    with pytest.raises(ConfigError, match=message):
        Driver(hook=(f"x={folder}",))


def test_a_set_made_for_this_model_is_taken(tmp_path):
    made = dataclasses.replace(MADE, hash=fingerprint(checkpoint.resolve("nano")))
    d = Driver(hook=(f"x={write_hooks(tmp_path / 'x', [Hook('head_out', (0,), 'rotate')], made=made)}",))
    assert d.engine.info.hooks["x"].parts == ("rotate at head_out of 1 layers, all rows",)
    d.close()


def test_requests_are_refused_by_name_and_strength(folders):
    d = serving(folders, ("turn",))
    for fields, status, param in [
        ({"hook": "turm"}, 404, "hook"),
        ({"hook": 3}, 400, "hook"),
        ({"hook": "turn", "hook_strength": 8.5}, 400, "hook_strength"),
        ({"hook": "turn", "hook_strength": -1.0}, 400, "hook_strength"),
    ]:
        with pytest.raises(RequestError) as refused:
            d.request("x", TEXT, **fields)
        assert refused.value.status == status and refused.value.param == param
    assert "Did you mean 'turn'?" in str(pytest.raises(RequestError, d.request, "x", TEXT, hook="turm").value)
    old = request(d, "old", "turn")
    old.hook = dataclasses.replace(old.hook, key="other bytes")
    d.submit(old)
    gone = dataclasses.replace(old, id="gone", hook=dataclasses.replace(old.hook, name="gone"))
    d.submit(gone)
    assert (d.errors["old"].status, d.errors["gone"].status) == (409, 404)
    d.close()


def test_rows_that_go_on_keep_their_hooks():
    fields = dict.fromkeys((f.name for f in dataclasses.fields(StepBatch)), None) | {"scratch": {"x": 1}}
    batch = StepBatch(**fields | {"hooks": torch.tensor([1, 2, 3])})
    some = batch.only(torch.tensor([2, 0]))
    assert some.hooks.tolist() == [3, 1] and some.variants is None and not some.scratch
    assert MAX_HOOKS == 8
