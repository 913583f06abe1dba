"""LoRA adapters of mixed steps: each request computes what its merged model does, whatever shares the step."""

from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.engine.variants import filling
from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.errors import ConfigError
from kvasir.kernels import lora
from kvasir.layers import adapters as slots
from kvasir.models import checkpoint
from kvasir.models.peft import PeftFolder
from kvasir.types import Sequence, Variant
from tests.adapters import NAMES, merge, write_adapter
from tests.checkpoints import write
from tests.engine.driver import Driver, use_ways

TEXT = [3 + 7 * i % 500 for i in range(60)]
# Rank and alpha of the adapters, by name; g has matrices of its own columns (PaCA).
ADAPTERS = {"a": (8, 16), "b": (16, 16), "c": (32, 16), "d": (64, 32), "e": (5, 20), "f": (8, 8), "g": (16, 16)}
ADAPTERS["h"] = 48, 96
# Largest difference of log-probabilities in fp32, of values up to about 20.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, (rank, alpha)) in enumerate(ADAPTERS.items()):
        extra = {"use_rslora": True} if name == "f" else {"targets": ("q_proj", "down_proj")} if name == "b" else {}
        write_adapter(root / name, rank=rank, alpha=alpha, seed=seed, strength=0.3, one_hot=name == "g", **extra)
    return root


@pytest.fixture(scope="module")
def oracle(folders):
    """Log-probabilities of TEXT by the merged model of each adapter, and by the base model ("")."""
    found = {}
    for name in ["", *ADAPTERS]:
        model = str(merge(folders / name, folders / f"merged-{name}")) if name else "nano"
        found[name] = scored(Driver(model=model), [("", TEXT)])[0]
    return found


def serving(folders, names=ADAPTERS, **options) -> Driver:
    """Serve adapters. Where all have slots, they are in them, so that their requests share steps from the first on."""
    modules = tuple(f"{name}={folders / name}" for name in names)
    d = Driver(**{"enable_lora": True, "max_loras": 8, "max_lora_rank": 64, "lora_modules": modules} | options)
    if len(names) <= d.engine.adapters.slots.num_slots:
        fill_slots(d, names)
    return d


def fill_slots(d: Driver, names) -> None:
    """Answer a short prompt of each adapter, shorter than a page."""
    for name in names:
        d.run([request(d, f"fill-{name}", name, TEXT[:2])])
    d.outputs.clear()


def request(d: Driver, id: str, name: str, prompt=TEXT, **params):
    made = d.request(id, list(prompt), **{"max_tokens": 1, "temperature": 0.0, "ignore_eos": True} | params)
    if name:
        made.variant = Variant(name, d.engine.info.adapters[name].key)
    return made


def scored(d: Driver, asked) -> list[torch.Tensor]:
    """Log-probabilities of each prompt's tokens, from one batch."""
    d.run([request(d, str(i), name, prompt, prompt_logprobs=0) for i, (name, prompt) in enumerate(asked)])
    found = [torch.tensor([p.logprob for p in d.outputs[str(i), 0].prompt_logprobs[1:]]) for i in range(len(asked))]
    d.close()
    return found


MIXED = ["", "a", "b", "c", "d", "", "e", "f", "g", "h"]


def check_equals_merged(folders, oracle, **options) -> None:
    found = scored(serving(folders, **options), [(name, TEXT) for name in MIXED])
    for name, logprobs in zip(MIXED, found):
        assert (logprobs - oracle[name]).abs().max() < TOLERANCE, f"adapter {name!r}"
    apart = [(oracle[""] - oracle[name]).abs().max() for name in ADAPTERS]
    assert min(apart) > 100 * TOLERANCE, "an adapter that changes nothing tests nothing"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", [512, 37])
def test_eight_adapters_in_a_batch_equal_their_merged_models(folders, oracle, exact, rows):
    check_equals_merged(folders, oracle, batch_invariant=exact, max_num_batched_tokens=rows)


def exchanged(monkeypatch) -> None:
    """Two rows of a step swap their slots."""
    add = slots.LowRank.add

    def wrong(self, x, y, batch, product):
        rows = (batch.variants > 0).nonzero()[:, 0]
        swapped = batch.variants.clone()
        if len(rows) > 1:
            swapped[rows[0]], swapped[rows[-1]] = batch.variants[rows[-1]], batch.variants[rows[0]]
        mutated = type(batch).__new__(type(batch))
        for field in type(batch).__slots__:
            setattr(mutated, field, getattr(batch, field))
        mutated.variants = swapped
        add(self, x, y, mutated, product)

    monkeypatch.setattr(slots.LowRank, "add", wrong)


def unscaled(monkeypatch) -> None:
    """Forget alpha / r."""
    monkeypatch.setattr(PeftFolder, "scale_of", lambda self, module, rank: 1.0)


def unsquared(monkeypatch) -> None:
    """Forget that ``use_rslora`` divides by the root of r."""
    monkeypatch.setattr(PeftFolder, "scale_of", lambda self, module, rank: self.alpha / rank)


@pytest.mark.parametrize("mutate", [exchanged, unscaled, unsquared])
def test_planted_mutations_fail(folders, oracle, mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="adapter"):
        check_equals_merged(folders, oracle)


# ------------------------------------------------------------------------------------------------ whatever runs beside

ASKED = [("", 0.0), ("a", 0.0), ("a", 1.0), ("c", 1.0), ("d", 0.0), ("g", 1.0), ("", 1.0)]


def fleet_of(d: Driver, i: int):
    name, t = ASKED[i]
    return request(d, str(i), name, TEXT[: 20 + 5 * i], temperature=t, seed=i, max_tokens=16)


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
    assert len({tuple(tokens) for tokens in found.values()}) == len(ASKED), "the adapters change nothing"
    return found


WAYS = {
    "together": {},
    "chunked": dict(max_num_batched_tokens=24),
    "overlap": dict(overlap=True),
    "captured decodes": dict(static=True, overlap=True),
    "captured pieces": dict(pieces=True, overlap=True, max_num_seqs=8, max_num_batched_tokens=64),
    "drafts": dict(drafter="suffix", draft_control="fixed"),
    "captured drafts": dict(drafter="suffix", draft_control="fixed", static=True),
    "draft model": dict(drafter="draft_model:model=nano", draft_control="fixed"),
    "int8": dict(kv_codec="int8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_token_depends_on_what_runs_beside(way, folders, alone):
    """The prefix cache is on, requests share prefixes, and sequences are preempted now and then."""
    options = dict(WAYS[way])
    d = serving(folders, **options)
    if "drafter" in options and "static" in options:
        use_ways(d.engine.runner, call_through, 8)
    if "kv_codec" in options:
        single = serving(folders, **options)
        for made in fleet(single):
            single.run([made])
        alone = {key: out.tokens for key, out in single.outputs.items()}
        single.close()
    d.run(fleet(d), gap=2, preempt_every=5)
    assert {key: out.tokens for key, out in d.outputs.items()} == alone
    if d.engine.proposals.drafting is not None:
        assert d.engine.stats().drafted_tokens > 0
    for way in d.engine.runner.ways:
        if type(way) in (DecodeGraphs, MixedSteps) and way._varied:  # not chains, which nothing forces here
            assert way._ready or way._uses if isinstance(way, MixedSteps) else way._used, "no varied step ran here"
    d.close()


def test_rows_without_an_adapter_are_bit_equal_to_an_engine_without(folders):
    for exact in (True, False):
        plain = Driver(batch_invariant=exact, fused_kernels=exact)
        mixed = serving(folders, batch_invariant=exact, fused_kernels=exact)
        want = scored(plain, [("", TEXT)] * 3)
        found = scored(mixed, [("", TEXT)] * 3)
        assert all(torch.equal(a, b) for a, b in zip(want, found))
        mixed = serving(folders, batch_invariant=exact, fused_kernels=exact)
        found = scored(mixed, [("", TEXT), ("a", TEXT), ("", TEXT)])
        # Of one shape, step by step: the middle one has an adapter, and the others have the bits of no adapters.
        assert torch.equal(want[0], found[0]) and torch.equal(want[2], found[2])
        assert not torch.equal(want[1], found[1])


def test_branches_share_the_adapter(folders, alone):
    d = serving(folders)
    d.run([request(d, "n", "a", TEXT[:25], temperature=1.0, seed=2, max_tokens=24, n=4)])
    many = [d.outputs["n", branch].tokens for branch in range(4)]
    assert len({tuple(t) for t in many}) == 4
    again = request(d, "m", "a", TEXT[:25], temperature=1.0, seed=2, max_tokens=24)
    d.run([again])
    assert d.outputs["m", 0].tokens == many[0]
    d.close()


# ------------------------------------------------------------------------------------------------------------ prefixes


def outputs_after_each_other(folders) -> list[tuple[list[int], int]]:
    d = serving(folders)
    found = []
    for i, name in enumerate(["", "a", "c", "a", ""]):
        d.run([request(d, str(i), name, TEXT, max_tokens=8)])
        found.append((d.outputs[str(i), 0].tokens, d.outputs[str(i), 0].num_cached))
    d.close()
    return found


def check_prefixes(folders) -> None:
    found = outputs_after_each_other(folders)
    assert found[1][0] == found[3][0] != found[2][0] and found[0][0] == found[4][0] != found[1][0], "other outputs"
    assert [cached for _, cached in found] == [0, 0, 0, 48, 48], "a prefix was offered to another adapter, or to none"


def test_a_prefix_is_for_its_own_adapter(folders):
    check_prefixes(folders)


def test_a_prefix_of_another_adapter_would_fail(folders, monkeypatch):
    monkeypatch.setattr(Sequence, "kv_variant", lambda self, end: "")
    with pytest.raises(AssertionError, match="other outputs|offered"):
        check_prefixes(folders)


def test_a_lease_is_for_its_own_adapter(folders):
    """A pause inside the first page: no full page tells the adapters apart."""
    d = serving(folders)

    def run(made) -> int:
        d.submit(made)
        while d.engine.has_work():
            d.step()
        return d.outputs[made.id, 0].num_cached

    for i, name in enumerate(("a", "c", "")):
        run(request(d, f"x{name}", name, TEXT[i : i + 9], max_tokens=4, lease=100.0))
        begun = TEXT[i : i + 9] + d.outputs[f"x{name}", 0].tokens
        for other in ("a", "c", ""):
            assert (run(request(d, f"{name}-{other}", other, begun, max_tokens=2)) > 0) == (name == other)
    d.close()


# --------------------------------------------------------------------------------------------------------- turns, swap


def test_adapters_are_swapped_while_others_answer(folders, alone):
    """Two slots for five adapters: each takes its turn, in a slot that was poisoned, and no answer changes."""
    d = serving(folders, max_loras=2, max_cpu_loras=3)
    turns, fills = d.engine.adapters._turns, []
    fill = turns._fill
    names = {info.key: name for name, info in d.engine.info.adapters.items()}
    turns._fill = lambda slot, key: (fills.append(names[key]), fill(slot, key))[1]
    d.run(fleet(d), gap=1, preempt_every=7)
    assert {key: out.tokens for key, out in d.outputs.items()} == alone
    assert set(fills) == {"a", "c", "d", "g"} and len(d.engine.adapters._held) <= 3
    d.close()


def check_pieces(folders, alone) -> None:
    """Sixteen pieces, one a step at most, while another answers; nobody starts before the last."""
    d = serving(folders, max_loras=2, batch_invariant=True)
    desk, turns, seen = d.engine.adapters, d.engine.adapters._turns._turns, []
    assert len(desk._staging.pieces) == len(desk.slots.products) > 8
    d.submit(fleet_of(d, 0))
    d.submit(fleet_of(d, 1))
    while d.engine.has_work():
        before = sum(turn.filling._sent for turn in turns.values() if turn.filling is not None)
        d.step()
        sent = [turn.filling._sent for turn in turns.values() if turn.filling is not None]
        seen += [count - before for count in sent]
        time.sleep(0.002)  # the other thread stages the next piece
    assert ("1", 0) in d.outputs and d.outputs["1", 0].tokens == alone["1", 0], "it began on an unfilled slot"
    assert d.outputs["0", 0].tokens == alone["0", 0] and seen and max(seen) <= 1
    d.close()


def test_a_slot_is_filled_in_pieces_between_steps(folders, alone, monkeypatch):
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    check_pieces(folders, alone)


@pytest.mark.parametrize("name", ["begun early", "one half of the memory"])
def test_pieces_in_the_wrong_order_would_fail(name, folders, alone, monkeypatch):
    """The mutations: sequences start before the last piece; a piece is staged where another still waits."""
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    if name == "begun early":
        done = property(lambda self: self._sent == len(self._staging.pieces) // 2)
        monkeypatch.setattr(filling.Filling, "done", done)
    else:
        monkeypatch.setattr(filling, "_aligned", lambda size: 0)
        monkeypatch.setattr(filling, "_bytes", lambda slots, name: 1 << 20)
    with pytest.raises(AssertionError, match="unfilled"):
        check_pieces(folders, alone)


def test_turns_of_one_slot_do_not_fill_it_for_nobody(folders):
    """Each adapter gets the slot once for its request: whoever it was filled for starts before it gives way."""
    d = serving(folders, names=("a", "b", "c"), max_loras=1)
    for name in "abc":
        d.submit(request(d, name, name, TEXT[:10], max_tokens=3))
    while d.engine.has_work():
        d.step()
    assert d.engine.adapters.filled == 3 and len(d.outputs) == 3
    d.close()


def test_an_adapter_is_loaded_in_mid_answer(folders, alone):
    d = serving(folders, names=("a", "c"))
    d.submit(fleet_of(d, 1))
    for _ in range(6):
        d.step()
    d.engine.adapters.start_loading("d", str(folders / "d"))
    while "d" not in d.engine.info.adapters:
        d.step()
        assert all(not isinstance(result, Exception) for _, result in d.engine.adapters.loaded())
    late = fleet_of(d, 4)
    d.run([late])
    assert d.outputs["1", 0].tokens == alone["1", 0] and d.outputs["4", 0].tokens == alone["4", 0]
    d.engine.adapters.unload("d")
    assert "d" not in d.engine.info.adapters
    d.close()


def test_other_weights_leave_adapters(folders, alone):
    d = serving(folders, names=("a", "c"))
    d.run([fleet_of(d, 1)])
    d.engine.update_weights(str(checkpoint.resolve("nano")))
    d.outputs.clear()
    d.run([fleet_of(d, 1), fleet_of(d, 3)])
    assert d.outputs["1", 0].num_cached == 0, "prefixes of the old weights are forgotten"
    assert d.outputs["1", 0].tokens == alone["1", 0] and d.outputs["3", 0].tokens == alone["3", 0]
    d.close()


def test_no_adapter_starves(folders):
    """One slot. Requests of one adapter keep coming; an older one of another still gets its turn."""
    d = serving(folders, names=("a", "b"), max_loras=1, max_num_seqs=4)
    for i in range(4):
        d.submit(request(d, f"a{i}", "a", TEXT[:10], max_tokens=6 + i))
    d.submit(request(d, "b", "b", TEXT[:10], max_tokens=4))
    for i in range(60):
        d.submit(request(d, f"more{i}", "a", TEXT[:10], max_tokens=6))
        d.step()
        if ("b", 0) in d.outputs and d.outputs["b", 0].finish_reason:
            break
    assert i < 30, "the other adapter waited for all that came after it"
    while d.engine.has_work():
        d.step()
    d.close()


def test_on_a_cpu_decodes_of_adapters_run_from_tapes_and_others_natively(folders, oracle):
    d = serving(folders, batch_invariant=False)
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
    assert ran[native] and not ran[tapes]
    ran[native].clear()
    d.run([request(d, "a", "a", TEXT[:20], max_tokens=12), request(d, "c", "c", TEXT[:20], max_tokens=12)])
    assert ran[tapes] and not ran[native]
    both = [d.outputs[name, 0].tokens for name in "ac"]
    single = serving(folders)
    single.run(
        [request(single, "a", "a", TEXT[:20], max_tokens=12), request(single, "c", "c", TEXT[:20], max_tokens=12)]
    )
    assert both == [single.outputs[name, 0].tokens for name in "ac"]
    single.close()
    d.close()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "config, tensors, why",
    [
        ({"use_dora": True}, {}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"bias": "all"}, {}, "biases"),
        ({"trainable_token_indices": [3]}, {}, "new tokens"),
        ({"target_parameters": ["experts"]}, {}, "experts"),
        ({"init_lora_weights": "corda"}, {}, "changed base"),
        ({"peft_type": "IA3"}, {}, "LORA is served"),
        ({"r": 0}, {}, "positive number"),
        ({}, {"lm_head.lora_A.weight": (4, 192), "lm_head.lora_B.weight": (99, 4)}, "the head"),
        ({}, {"model.embed_tokens.lora_embedding_A": (4, 9)}, "the embedding"),
        ({}, {"model.layers.0.mlp.experts.3.up_proj.lora_A.weight": (2, 3)}, "lora_B"),
        ({}, {f"model.layers.9.mlp.up_proj.lora_{ab}.weight": s for ab, s in (("A", (2, 9)), ("B", (9, 2)))}, "has no"),
        ({}, {"model.layers.0.self_attn.q_norm.weight": (64,)}, "no low-rank matrix"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_served_is_refused_by_name(tmp_path, config, tensors, why):
    folder = write_adapter(tmp_path / "x", targets=("q_proj",), **config)
    file = folder / "adapter_model.safetensors"
    extra = {f"base_model.model.{name}": torch.ones(shape) for name, shape in tensors.items()}
    save_file(load_file(file) | extra, file)
    with pytest.raises(ConfigError, match=why) as refused:
        Driver(enable_lora=True, lora_modules=(f"x={folder}",))
    fixes = ("merge_lora:adapter=", "path_initial_model", "to_lora", "lora_B", "positive")
    assert any(fix in str(refused.value) for fix in fixes), "the error names no way out"


def test_an_adapter_of_another_shape_or_rank_is_refused(tmp_path, folders):
    for options, why in (({"max_lora_rank": 8}, "--max-lora-rank 8"), ({"model": "base"}, "another base model")):
        with pytest.raises(ConfigError, match=why):
            Driver(enable_lora=True, lora_modules=(f"d={folders / 'd'}",), **{"max_lora_rank": 64} | options)


def test_unknown_names_and_changed_bytes(folders, tmp_path):
    d = serving(folders, names=("a",))
    made = request(d, "x", "a")
    made.variant = Variant("zz", "0")
    d.submit(made)
    assert d.errors["x"].status == 404 and d.errors["x"].param == "model"
    made = request(d, "y", "a")
    made.variant = Variant("a", "other bytes")
    d.submit(made)
    assert d.errors["y"].status == 409 and "send the request again" in d.errors["y"].message
    d.close()


def test_an_adapter_that_left_memory_and_changed_on_disk(folders, tmp_path):
    """It left host memory for others; its folder has other bytes when it is read again: its requests get 409."""
    write_adapter(tmp_path / "x", seed=50)
    modules = (f"x={tmp_path / 'x'}", f"a={folders / 'a'}", f"c={folders / 'c'}")
    d = Driver(enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=64, lora_modules=modules)
    write_adapter(tmp_path / "x", seed=51)
    d.run([request(d, "a", "a", max_tokens=2), request(d, "x", "x", max_tokens=2), request(d, "c", "c", max_tokens=2)])
    assert (
        d.errors["x"].status == 409 and d.outputs["c", 0].finish_reason == d.outputs["a", 0].finish_reason == "length"
    )
    d.close()


def test_slots_hold_nothing_of_who_was_there(folders):
    """The next adapter has lower rank and fewer matrices: nothing of the last one is left."""
    d = serving(folders, names=("d", "b"), max_loras=1)
    d.run([request(d, "d", "d", max_tokens=4)])
    d.run([request(d, "b", "b", max_tokens=4)])
    for product in d.engine.adapters.slots.products.values():
        pairs = product.low_rank.pairs
        assert pairs.a_SCK.isfinite().all() and pairs.b_SNR.isfinite().all()
    name = "layers.0.mixer.o"
    pairs: lora.Pairs = d.engine.adapters.slots.products[name].low_rank.pairs
    assert not pairs.a_SCK.any() and pairs.ranks_S.tolist() == [0], "b leaves this product alone"
    d.close()


@pytest.mark.parametrize("family", ["llama_bias", "qwen2", "qwen3_window", "gemma3_text", "qwen3_moe"])
def test_every_family_equals_its_merged_model(family, tmp_path):
    """Biases, windows, sandwich norms, another activation; of a mixture of experts, the attention."""
    base = str(write(tmp_path / "base", family))
    write_adapter(tmp_path / "x", rank=4, seed=3, model=base, targets=NAMES[:4] if family == "qwen3_moe" else NAMES)
    merged, ids = str(merge(tmp_path / "x", tmp_path / "merged", model=base)), [i % 50 for i in TEXT]
    options = {"max_model_len": 128, "dtype": "float32", "skip_tokenizer_init": True}
    lora = {"enable_lora": True, "lora_modules": (f"x={tmp_path / 'x'}",)}
    for exact in (True, False):
        want = scored(Driver(model=merged, batch_invariant=exact, **options), [("", ids)])[0]
        plain, found = scored(Driver(model=base, batch_invariant=exact, **options, **lora), [("", ids), ("x", ids)])
        assert (found - want).abs().max() < TOLERANCE < 1e-3 < (found - plain).abs().max()
