"""Steps by the native kernels, compared with the plain path: logits and cache of every family, tokens of the shipped
models."""

import gc
import weakref

import pytest
import torch

from kvasir import LLM
from kvasir.engine.start import build
from kvasir.engine.ways.batch import pack
from kvasir.errors import ConfigError
from kvasir.kernels.native.library import Native, native
from kvasir.models import native_decoder
from kvasir.models.native_decoder import MAX_ROWS, NARROW_DECODES, NARROW_ROWS, NativeDecoder, why_not
from kvasir.types import SamplingParams, Span
from tests import checkpoints
from tests.engine.driver import Driver
from tests.models.test_parity import LENGTHS, PAGE_SLOTS, Paged

needs_native = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
# Those with parts that the C kernels do not know, and the reason.
LEFT = {
    "qwen3_moe": "not plain grouped-query attention and a dense block",
    "gpt_oss": "not plain grouped-query attention and a dense block",
    "ministral3": "not plain grouped-query attention and a dense block",
    "mistral3_ministral": "not plain grouped-query attention and a dense block",
    "deepseek_v3_dense": "not plain grouped-query attention and a dense block",
    "olmo2": "not plain grouped-query attention and a dense block",
    "granite": "not plain grouped-query attention and a dense block",
    "gemma4": "not plain grouped-query attention and a dense block",
    "gemma4_text_plain": "not plain grouped-query attention and a dense block",
    "smollm3": "rotate a part of a head",
    "smollm3_window": "rotate a part of a head",
    "smollm3_mixed": "rotate a part of a head",
    "phi3_partial": "rotate a part of a head",
    "phi3_longrope": "rotate a part of a head",
}
OTHERS = ("qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "olmo2", "gemma4_text", "deepseek", "mistral4", "qwen3_5")
OTHERS += ("qwen3_next", "kimi_linear", "mistral3_latents", "kvasir_mla")
DENSE = [name for name in checkpoints.VARIANTS if name not in LEFT and not name.startswith(OTHERS)]


class NativePaged(Paged):
    def step(self, spans, taps=None):
        if not hasattr(self, "native"):
            assert why_not(self.model, self.caches, self.backend) is None
            self.native = NativeDecoder(self.model, self.caches)
        batch = pack(spans, PAGE_SLOTS, "cpu", len(self.pool.groups))
        batch.logit_rows = torch.arange(batch.input_ids.shape[0])
        return self.native.logits(batch).clone().split([s.length for s in spans])


@needs_native
@pytest.mark.parametrize("variant", DENSE)
def test_every_family_computes_what_the_plain_path_does(variant, tmp_path):
    """Chunks of several lengths at once, with new pages full of NaN."""
    folder = checkpoints.write(tmp_path / variant, variant, head_dim=16)
    mine, plain = NativePaged(folder), Paged(folder)
    for got, want in zip(mine.run(lambda i: 3 + 5 * i), plain.run(lambda i: 50)):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    for a, b in zip(mine.caches, plain.caches):
        for name in a.planes:
            torch.testing.assert_close(a.planes[name], b.planes[name], atol=2e-4, rtol=2e-4, equal_nan=True)


@pytest.mark.parametrize("variant", LEFT)
def test_models_with_other_parts_are_left_to_other_ways(variant, tmp_path):
    paged = Paged(checkpoints.write(tmp_path / variant, variant))
    assert LEFT[variant] in why_not(paged.model, paged.caches, paged.backend)


@needs_native
def test_steps_of_both_kinds_may_follow_each_other(tmp_path):
    folder = checkpoints.write(tmp_path / "qwen3", "qwen3")
    mixed, plain = NativePaged(folder), Paged(folder)
    whole = plain.run(lambda i: 50)
    for i, seq in enumerate(mixed.seqs):
        half = LENGTHS[i] // 2
        (first,), (second,) = mixed.step([Span(seq, 0, half)]), Paged.step(mixed, [Span(seq, half, LENGTHS[i] - half)])
        torch.testing.assert_close(torch.cat([first, second]), whole[i], atol=2e-4, rtol=2e-4)


@needs_native
@pytest.mark.parametrize("variant", ["qwen3", "gemma3_text_caps"])
def test_trees_beside_prompts_and_decodes(variant, tmp_path):
    """Slots that a tree's rows must not see hold keys of other tokens."""
    folder = checkpoints.write(tmp_path / variant, variant, head_dim=16)
    found = []
    for kind in (NativePaged, Paged):
        paged = kind(folder)
        a, b, c = paged.seqs
        paged.step([Span(a, 0, 20), Span(c, 0, 17)])
        spans = [Span(a, 20, 6, parents=[-1, 0, 0, 1, 1, 2]), Span(b, 0, 3), Span(c, 17, 1)]
        found.append(torch.cat(paged.step(spans)))
        for span in spans:
            span.parents = None
        straight = torch.cat(paged.step(spans))
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(found[1], straight, atol=1e-3), "the tree must matter here"


@needs_native
def test_logits_of_more_rows_than_a_call_computes(tmp_path, monkeypatch):
    """A long scored prompt asks for logits as a function of slices, like the plain path."""
    folder = checkpoints.write(tmp_path / "gemma", "gemma3_text_caps", head_dim=16)
    whole = Paged(folder).run(lambda i: 50)
    monkeypatch.setattr(native_decoder, "LOGIT_ROWS", 10)
    paged = Paged(folder)
    batch = pack([Span(seq, 0, len(seq.tokens)) for seq in paged.seqs], PAGE_SLOTS, "cpu", len(paged.pool.groups))
    batch.logit_rows = torch.arange(2, batch.input_ids.shape[0])
    logits = NativeDecoder(paged.model, paged.caches).logits(batch)
    for first, stop in ((0, len(batch.logit_rows)), (3, 4), (5, 31)):
        torch.testing.assert_close(logits(first, stop), torch.cat(whole)[2 + first : 2 + stop], atol=2e-4, rtol=2e-4)


@needs_native
def test_what_is_left_to_the_plain_path(tmp_path, monkeypatch):
    paged = Paged(checkpoints.write(tmp_path / "a", "qwen3"))
    decoder = NativeDecoder(paged.model, paged.caches)

    def takes(length, count=1):
        return decoder.takes(length * count, count)

    for wide, prompt, decodes in ((True, MAX_ROWS, MAX_ROWS), (False, NARROW_ROWS, NARROW_DECODES)):
        monkeypatch.setattr(decoder, "_wide", lambda wide=wide: wide)
        assert takes(prompt) and not takes(prompt + 1) and takes(1, decodes) and not takes(1, decodes + 1)

    def reason(variant, exact=False, **changes):
        made = Paged(checkpoints.write(tmp_path / f"{variant}{changes}", variant, **changes), exact)
        return why_not(made.model, made.caches, made.backend)

    assert "exact" in reason("qwen3", exact=True)
    assert "dense" in reason("qwen3_moe")
    assert "head dim" in reason("llama")
    monkeypatch.setattr(native_decoder, "native", lambda: Native(None, "no C compiler"))
    assert reason("qwen3") == "no C compiler"


def tokens(native_too, monkeypatch, lengths, gap=0, alike=7, max_tokens=40, **options):
    """Run requests and return their tokens. ``gap``: steps between arrivals; ``alike`` 0: each prompt begins all longer
    ones."""
    if not native_too:
        monkeypatch.setattr(build, "why_not", lambda *args: "off")
    driver = Driver(
        **{"batch_invariant": False, "max_num_batched_tokens": 64, "max_num_seqs": 32, "num_pages": 120} | options
    )
    assert (driver.engine.runner.native is not None) == native_too
    reqs = [
        driver.request(
            f"r{k}",
            [300 + (11 * i + alike * k) % 1500 for i in range(n)],
            temperature=k % 2,
            max_tokens=max_tokens,
            seed=k,
            ignore_eos=True,
        )
        for k, n in enumerate(lengths)
    ]
    driver.run(reqs, gap=gap)
    used = native_too and driver.engine.runner.native.native._program is not None
    found = {key: out.tokens for key, out in driver.outputs.items()}
    driver.close()
    return found, used


@needs_native
@pytest.mark.parametrize(
    "model, lengths",
    [("nano", [20]), ("nano", [5, 33, 64]), ("nano", [7 * k + 3 for k in range(18)]), ("base", [5, 33])],
)
def test_tokens_are_those_of_the_plain_path(model, lengths, monkeypatch):
    """Greedy and seeded tokens, while pages are freed, filled with NaN and taken again."""
    mine, used = tokens(True, monkeypatch, lengths, model=model)
    plain, _ = tokens(False, monkeypatch, lengths, model=model)
    assert used and mine == plain


LOADS = {
    "mixed": dict(gap=3, max_num_batched_tokens=256),
    "prefix hits": dict(gap=5, alike=0),
    "drafts": dict(gap=2, drafter="ngram"),
    "draft trees": dict(gap=2, drafter="token_recycling", draft_control="fixed"),
    "chunks": dict(max_num_batched_tokens=33),
}


@needs_native
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_tokens_of_mixed_steps(load, monkeypatch):
    """Prompts arrive while others decode; every step is native, also on processors that would leave large steps to a
    BLAS."""
    lengths = [150, 40, 200, 90, 130, 70]
    plain, _ = tokens(False, monkeypatch, lengths, max_tokens=16, **load)
    monkeypatch.undo()
    monkeypatch.setattr(
        native_decoder.Decoder, "forward", lambda *args, **options: pytest.fail("a step of the plain path")
    )
    monkeypatch.setattr(NativeDecoder, "_wide", lambda decoder: True)
    mine, used = tokens(True, monkeypatch, lengths, max_tokens=16, **load)
    assert used and mine == plain


def test_without_fused_kernels_steps_take_the_plain_path():
    driver = Driver(batch_invariant=False, fused_kernels=False)
    assert driver.engine.runner.native is None and not driver.engine.runner.model.place.fused
    driver.close()
    with pytest.raises(ConfigError, match="Leave out --batch-invariant, or --no-fused-kernels"):
        Driver(fused_kernels=False)


@needs_native
def test_the_comparison_can_fail(monkeypatch):
    """Negative control: with the sign of one weight changed, the tokens differ."""
    plain, _ = tokens(False, monkeypatch, [20])
    monkeypatch.undo()
    build = NativeDecoder._build

    def wrong(self, library):
        program = build(self, library)
        head = program._ops[self._draw - 1]
        head.scale = -head.scale
        return program

    monkeypatch.setattr(NativeDecoder, "_build", wrong)
    assert tokens(True, monkeypatch, [20])[0] != plain


@needs_native
@pytest.mark.parametrize(
    "weights", ["u4:group=32", "u4:group=32,zeros=true", "i8:group=32", "u4:inputs=int8", "q4_k", "q6_k"]
)
def test_codes_are_held_once(weights, tmp_path):
    """The panels take the codes, the plain path makes them again, and new weights find a place."""
    if native().library.kvasir_lanes() <= 4:
        pytest.skip("long prompts take the plain path here, so the codes stay")
    options = dict(
        model=str(wide_enough(tmp_path)), weights=weights, device="cpu", num_threads=1, skip_tokenizer_init=True
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens(llm):
        return llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)[0].outputs[0].token_ids

    with LLM(**options) as llm:
        model = llm.engine.runner.model
        coded = [w for w in model.weights() if w.format.code_planes]
        before = [{name: plane.clone() for name, plane in w.planes.items()} for w in coded]
        size, references = [w.num_bytes for w in coded], [weakref.ref(w.planes["weight"]) for w in coded]
        want = tokens(llm)
        gc.collect()
        assert coded and not any(r() is not None for r in references), "somebody still holds the codes"
        assert [w.num_bytes for w in coded] == size
        for w, planes in zip(coded, before):
            assert w.planes.keys() == planes.keys()
            assert all(torch.equal(w.planes[name], plane) for name, plane in planes.items())
        assert tokens(llm) == want
        llm.engine.update_weights(options["model"])
        assert tokens(llm) == want and "weight" not in coded[0]._planes


def wide_enough(folder):
    """A small model whose rows are whole blocks of every format."""
    return checkpoints.write(
        folder / "wide", "qwen3", hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4
    )
