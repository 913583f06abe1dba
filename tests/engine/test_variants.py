"""The variant of a row: which rows of a step have one, on every way to the device; and whose pages are shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.client import journal
from kvasir.engine.pages.prefix import PrefixIndex
from kvasir.engine.ways.batch import Frame, Packer
from kvasir.engine.ways.device_seats import ROW_WORDS, DeviceSeats, draft_words
from kvasir.types import Request, SamplingParams, Sequence, Span, Variant

PAGE = 4


def sequence(count: int, variant: Variant | None = None, slot: int = 0) -> Sequence:
    ids = list(range(count))
    request = Request(id="r", prompt_ids=ids, params=SamplingParams(), seed=0, max_tokens=9, variant=variant)
    seq = Sequence(request)
    seq.variant, seq.tables = slot, [list(range(1, 40))]
    return seq


def adapter(key: str = "a", **fields) -> Variant:
    return Variant("name", key, **fields)


# ------------------------------------------------------------------------------------------------------------ the rows


@pytest.mark.parametrize("start", [0, 3, 5, 9])
def test_a_row_has_its_variant_by_position_alone(start):
    """However a sequence is cut into spans, the same positions have the variant; so a recomputed answer has it, too."""
    seq = sequence(10, adapter(start=start), slot=2)
    whole = [2 if position >= start else 0 for position in range(10)]
    for cuts in ([10], [1] * 10, [4, 1, 5], [9, 1]):
        found, at = [], 0
        for length in cuts:
            batch = Packer(PAGE, 1, "cpu").pack([Span(seq, at, length)])
            found += [0] * length if batch.variants is None else batch.variants.tolist()
            at += length
        assert found == whole, cuts


def by_length(span: Span, out: np.ndarray) -> None:
    """The mutation: a gate on the span's length, which takes a recomputed answer for a prompt."""
    out[:] = span.seq.variant if span.length == 1 else 0


def test_a_gate_on_the_spans_length_would_fail(monkeypatch):
    monkeypatch.setattr("kvasir.engine.ways.batch.row_variants", by_length)
    with pytest.raises(AssertionError, match="10"):
        test_a_row_has_its_variant_by_position_alone(3)


def test_a_step_without_variants_has_none():
    plain, late = sequence(8), sequence(8, adapter(start=6), slot=1)
    spans = [Span(plain, 0, 5), Span(late, 0, 6)]
    assert not any(span.varied for span in spans)
    assert Packer(PAGE, 1, "cpu").pack(spans).variants is None


def test_a_framed_batch_has_the_variants_where_the_frame_says():
    memory = torch.full((Frame.words(32, 16, 1),), 7)
    spans = [Span(sequence(9, adapter(), slot=3), 4, 5), Span(sequence(9), 2, 4)]
    packer = Packer(PAGE, 1, "cpu")
    plain, framed = packer.pack(spans), packer.pack(spans, Frame(32, 16, memory, varied=True))
    *_, variants, _ = Frame(32, 16, memory, varied=True).parts(1)
    assert variants.data_ptr() == framed.variants.data_ptr() and variants.dtype == torch.int32
    assert plain.variants.tolist() == [3] * 5 + [0] * 4
    assert variants.tolist() == plain.variants.tolist() + [0] * 23, "padding has none"
    assert torch.equal(framed.input_ids[:9], plain.input_ids)
    assert Frame(32, 16, memory).parts(1)[-1] is None


def drafted(variant: Variant | None, slot: int, guests: int = 0, guest_variant: int = 0) -> Span:
    """A tree of three drafts behind three tokens: the second and third are children of the first."""
    seq = sequence(3, variant, slot)
    seq.draft, seq.guest_variant = [7, 8, 9], guest_variant
    parents = [-1, 0, 1, 1, *range(3, 3 + guests)]
    return Span(seq, 2, 4 + guests, {"sample": range(4)}, "walk", parents, seat=0, guests=range(guests))


@pytest.mark.parametrize("guest_variant", [0, 5])
@pytest.mark.parametrize("start", [0, 3, 4, 9])
def test_drafts_have_it_by_position_and_guests_by_their_drafter(start, guest_variant):
    span = drafted(adapter(start=start), 2, guests=2, guest_variant=guest_variant)
    expected = [2 if position >= start else 0 for position in (2, 3, 4, 4)] + [guest_variant] * 2
    words = np.empty((ROW_WORDS, 8), np.int64)
    draft_words([span], 6, words)
    assert words[8].tolist() == expected + [0, 0]
    batch = Packer(PAGE, 1, "cpu").pack([span])
    assert (batch.variants is None and not any(expected)) or batch.variants.tolist() == expected


def test_seats_know_the_variant_and_where_it_begins():
    seats = DeviceSeats(4, 3, 1, "cpu")
    for seat, (variant, slot) in enumerate([(None, 0), (adapter(), 1), (adapter(start=6), 2)]):
        seq = sequence(8, variant, slot)
        seq.seat, seq.tables = seat, [[1, 2, 3]]
        seats.open(seq, 1.0, 0, 1.0, 0.0, 0)
        seats.bring([Span(seq, 5, 1, seat=seat)])
    rows = torch.tensor([0, 1, 2, 2, seats.padding])
    found = seats.variants(rows, torch.tensor([7, 0, 5, 6, 0]))
    assert found.dtype == torch.int32 and found.tolist() == [0, 1, 0, 2, 0]


def test_rows_that_go_on_keep_their_variants():
    batch = Packer(PAGE, 1, "cpu").pack([Span(sequence(9, adapter(), slot=3), 4, 5), Span(sequence(9), 2, 4)])
    batch.scratch["sorted"] = "of all rows"
    some = batch.only(torch.tensor([8, 4]))
    assert some.variants.tolist() == [0, 3] and not some.scratch
    batch.variants = None
    assert batch.only(torch.tensor([8])) is batch


# ----------------------------------------------------------------------------------------------------------- the pages


def keys(variant: Variant | None, index: PrefixIndex, count: int = 4) -> list[bytes]:
    seq = sequence(PAGE * count, variant)
    return [index.key(seq, page) for page in range(count)]


def test_pages_are_shared_up_to_the_first_row_of_a_variant():
    index = PrefixIndex(b"root", PAGE, 1)
    base = keys(None, index)
    for start, shared in ((0, 0), (3, 0), (4, 1), (8, 2), (15, 3), (16, 4)):
        own = keys(adapter(start=start), index)
        assert [a == b for a, b in zip(base, own)] == [page < shared for page in range(4)], start
    assert keys(adapter("a"), index) == keys(Variant("another name", "a"), index), (
        "the content is the key, not the name"
    )
    assert not set(keys(adapter("a"), index)) & set(keys(adapter("b"), index))
    assert keys(adapter(changes_kv=False), index) == base


def test_a_walk_compares_the_variant_and_not_only_the_key(monkeypatch):
    index = PrefixIndex(b"root", PAGE, 1)
    seq = sequence(8, adapter("a"))
    node = index.child(index.tenant(seq), seq, 0)
    node.pages[0] = 1
    assert [n.pages[0] for n in index.walk(sequence(8, adapter("a")), 1)] == [1]
    other = sequence(8, adapter("b"))
    other.page_keys = list(seq.page_keys)  # a collision
    assert not list(index.walk(other, 1))


def test_the_variant_is_durable(tmp_path):
    request = sequence(3, adapter("a", start=2)).request
    journal.write(tmp_path / "journal", [request])
    assert journal.load(tmp_path / "journal")[0].variant == request.variant
    assert journal.Journal().add(request).request.variant == request.variant
