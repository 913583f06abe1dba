"""Page tables: allocation, sharing, copy-on-write, prefix hits over groups, windows, limbo, eviction, checks."""

from __future__ import annotations

import random

import pytest

from kvasir.types import PageCopy, Plan, Sequence, Span
from tests.engine.fake import FULL, FakeModel, manager, request, sequence, window_group


def compute(pages, seq, num_tokens=None) -> None:
    """Do what a step does: grow to ``num_tokens`` (default: all that are known) and commit."""
    end = seq.num_tokens if num_tokens is None else num_tokens
    assert pages.grow(seq, end, [])
    seq.num_computed = end
    pages.commit(seq)


def start(pages, prompt, **options) -> Sequence:
    seq = sequence(prompt, **options)
    pages.admit(seq, pages.match(seq))
    compute(pages, seq)
    return seq


def fits(pages, seq, num_hit, num_tokens, **options) -> bool:
    return not any(pages.lacking(seq, num_hit, num_tokens, **options))


# ---------------------------------------------------------------------------------------------------------- tables


def test_page_zero_is_never_handed_out_and_all_pages_come_back():
    pages = manager(8, 4)
    seq = start(pages, 28)
    assert sorted(seq.tables[0]) == [1, 2, 3, 4, 5, 6, 7] and pages.num_free == 0 and pages.num_total == 7
    pages.check([seq])
    pages.release(seq)
    assert seq.tables == [] and pages.num_free == 7 and pages.num_cached == 7
    pages.check([])


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(4)), (window_group(4), FULL)])
def test_grow_is_all_or_nothing(groups):
    pages = manager([5 + 4 * (g is not FULL) for g in groups], 4, groups, prefix_root=None)
    seq, copies = sequence(40), []
    pages.admit(seq, 0)
    assert pages.grow(seq, 10, copies)
    before = [list(t) for t in seq.tables], [list(p.free) for p in pages.pools]
    assert not pages.grow(seq, 17, copies)
    assert before == ([list(t) for t in seq.tables], [list(p.free) for p in pages.pools]) and not copies
    assert pages.grow(seq, 16, copies)
    pages.check([seq])


def test_grow_that_needs_nothing_takes_nothing():
    pages = manager(8, 4)
    seq = start(pages, 5)
    free = pages.num_free
    for n in (6, 7, 8):
        assert pages.grow(seq, n, [])
    assert pages.num_free == free
    assert pages.grow(seq, 9, []) and pages.num_free == free - 1


def test_truncate_gives_back_look_ahead_only():
    pages = manager(10, 4)
    seq = start(pages, 6)
    assert pages.grow(seq, 20, []) and pages.num_free == 4
    pages.truncate(seq, 7)
    assert len(seq.tables[0]) == 2 and pages.num_free == 7
    with pytest.raises(AssertionError):
        pages.truncate(seq, 5)
    pages.check([seq])


def test_on_free_hears_of_content_that_died_and_of_nothing_else():
    freed = []
    pages = manager(6, 4, on_free=lambda group, ids: freed.extend(ids))
    seq = start(pages, 10)
    tail = seq.tables[0][2]
    pages.release(seq)
    assert freed == [tail], "full pages live on in the cache"
    other = start(pages, [50 + i for i in range(17)])
    assert sorted(other.tables[0]) == [1, 2, 3, 4, 5] and len(freed) == 3, (
        "two cached pages were taken, three were free"
    )
    pages.release(other)
    assert len(freed) == 4
    pages.check([])


# ---------------------------------------------------------------------------------------------------------- prefix


def test_a_hit_is_whole_pages_and_leaves_a_token_to_compute():
    pages = manager(20, 4)
    start(pages, 12)
    assert pages.match(sequence(12)) == 8, "the last prompt token must be computed for its logits"
    assert pages.match(sequence(13)) == 12
    assert pages.match(sequence(7)) == 4
    assert pages.match(sequence(3)) == 0
    assert pages.match(sequence(13), limit=7) == 4
    assert pages.match(sequence([*range(6), 99, 99, 99])) == 4


def test_hits_are_shared_not_copied():
    pages = manager(20, 4)
    a = start(pages, 10)
    b = sequence(10)
    pages.admit(b, pages.match(b))
    assert b.tables[0] == a.tables[0][:2] and b.num_computed == b.num_cached == 8
    compute(pages, b)
    assert b.tables[0][2] != a.tables[0][2]
    pages.check([a, b])
    pages.release(a)
    pages.check([b])
    pages.release(b)
    assert pages.num_cached == 2 and pages.num_free == 19


def test_tenants_never_share():
    pages = manager(20, 4)
    start(pages, 12, tenant="a")
    assert pages.match(sequence(12, tenant="b")) == 0 and pages.match(sequence(12, tenant="a")) == 8


def test_only_committed_pages_are_indexed():
    pages = manager(20, 4)
    seq = sequence(16)
    pages.admit(seq, 0)
    assert pages.grow(seq, 16, [])
    assert pages.match(sequence(16)) == 0
    seq.num_computed = 7
    pages.commit(seq)
    assert pages.match(sequence(16)) == 4
    seq.draft = [1, 2, 3, 4]
    seq.num_computed = 15
    pages.commit(seq)
    assert pages.match(sequence(17)) == 12


def test_generated_tokens_are_indexed_too():
    pages = manager(20, 4)
    seq = start(pages, 6)
    seq.tokens += [70, 71, 72]
    compute(pages, seq, 8)
    assert pages.match(sequence([*range(6), 70, 71, 1])) == 8


def test_prefix_caching_off():
    pages = manager(20, 4, prefix_root=None)
    seq = start(pages, 12)
    assert pages.match(sequence(12)) == 0 and pages.page_key(seq, 0) is None
    pages.check([seq])
    pages.release(seq)
    assert pages.num_cached == 0 and pages.num_free == 19


def test_eviction_takes_the_least_recently_used_and_tails_first():
    pages = manager(7, 4)
    old, new = start(pages, 12), start(pages, [50 + i for i in range(12)])
    pages.release(old)
    pages.release(new)
    third = sequence([90] * 8)
    pages.admit(third, 0)
    assert pages.grow(third, 4, [])
    assert pages.match(sequence(13)) == 8 and pages.match(sequence([50 + i for i in range(13)])) == 12
    assert pages.grow(third, 8, [])
    assert pages.match(sequence(13)) == 4 and pages.match(sequence([50 + i for i in range(13)])) == 12
    pages.check([third])


def test_a_hit_is_taken_before_anything_is_allocated():
    pages = manager(5, 4)
    pages.release(start(pages, 12))  # 3 cached, 1 free
    seq = sequence([*range(12), 5, 5, 5, 5])
    hit = pages.match(seq)
    assert hit == 12 and fits(pages, seq, hit, 16) and not fits(pages, seq, hit, 17)
    assert not fits(pages, sequence([9] * 20), 0, 17)
    pages.admit(seq, hit)
    assert pages.grow(seq, 16, []), "must take the free page, not one of its own hit"
    assert len(set(seq.tables[0])) == 4
    pages.check([seq])


def test_num_cached_is_what_the_first_admission_found():
    pages = manager(20, 4)
    start(pages, 12)
    seq = sequence(13)
    pages.admit(seq, 8)
    assert seq.num_cached == 8 and pages.cached_tokens == 8
    pages.release(seq)
    seq.num_preempted, seq.num_computed = 1, 0
    pages.admit(seq, 12)
    assert seq.num_cached == 8 and pages.cached_tokens == 8


def test_what_a_branch_finds_of_its_own_requests_prompt_was_not_cached():
    pages = manager(20, 4)
    first, second = start(pages, 13), sequence(13, branch=1)  # the second comes too late to fork: the first has ended
    pages.release(first)
    assert pages.match(second) == 12
    pages.admit(second, 12)
    assert second.num_computed == 12 and first.num_cached == second.num_cached == 0
    assert pages.cached_tokens == 0 and pages.queried_tokens == 13


def test_a_duplicate_page_stays_private_and_the_chain_goes_on():
    pages = manager(20, 4)
    a, b = sequence(8), sequence(8)
    for seq in (a, b):
        pages.admit(seq, 0)
    compute(pages, a, 4)
    compute(pages, b, 8)
    pages.check([a, b])
    pages.release(a)
    assert pages.num_cached == 1
    other = sequence([90] * 72)
    pages.admit(other, 0)
    assert pages.grow(other, 68, [])  # all free pages, and the page that ``a`` had indexed
    assert pages.num_free == 0
    pages.check([b, other])
    assert pages.match(sequence(9)) == 0, "the first page of the chain is gone"
    pages.release(other)
    c = sequence(9)
    pages.admit(c, 0)
    compute(pages, c, 4)
    assert pages.match(sequence(9)) == 8, "once its first page is back, b's second page is found again"
    pages.check([b, c])


# --------------------------------------------------------------------------------------------------------- windows


def test_a_window_group_frees_what_fell_out():
    pages = manager([30, 30], 4, (FULL, window_group(6)))
    seq = sequence(40)
    pages.admit(seq, 0)
    for end in (8, 9, 13, 40):
        compute(pages, seq, end)
        first = max(0, end - 6 + 1) // 4
        table = seq.tables[1]
        assert not any(table[:first]) and all(table[first:]), "exactly the pages below the next row's window are gone"
        pages.check([seq])
    assert len(seq.tables[0]) == 10 and seq.tables[1].count(0) == 8
    pages.release(seq)
    assert pages.num_free == pages.num_total


def test_a_hit_needs_every_group():
    pages = manager([30, 30], 4, (FULL, window_group(5)))
    seq = start(pages, 20)
    assert pages.match(sequence(21)) == 20
    window = pages.pools[1]
    in_use = [page for page in seq.tables[1] if page]
    pages.release(seq)
    other = sequence([90] * 40)
    pages.admit(other, 0)
    window.unlist(in_use[-1])  # as an eviction of the last window page would
    window.cached.remove(in_use[-1])
    window.free.append(in_use[-1])
    assert pages.match(sequence(21)) == 16, "the window group still has the pages of a shorter prefix"
    hit = sequence(21)
    pages.admit(hit, 16)
    assert hit.tables[1][:3] == [0, 0, 0] and hit.tables[1][3] and all(hit.tables[0])
    pages.check([hit, other])


def test_window_hits_take_what_the_next_row_sees_and_no_more():
    pages = manager(30, 4, (window_group(5),))
    start(pages, 16)
    seq = sequence(17)
    pages.admit(seq, pages.match(seq))
    assert seq.num_computed == 16
    assert [bool(p) for p in seq.tables[0]] == [False, False, False, True], "only positions 12 to 15"


def test_room_of_a_window_group_is_bounded_by_its_window():
    pages = manager([40, 8], 4, (FULL, window_group(6)))
    seq = sequence(100)
    assert fits(pages, seq, 0, 100, max_span=8) and not fits(pages, seq, 0, 100, max_span=40)
    assert pages.fits(100, 8) and not pages.fits(100, 40) and not pages.fits(160, 8)
    pages.admit(seq, 0)
    while seq.num_computed < 100:
        compute(pages, seq, min(100, seq.num_computed + 8))
        pages.check([seq])


@pytest.mark.parametrize("page_slots", [1, 2, 4])
def test_the_peak_of_a_window_group_is_exact(page_slots):
    for window in range(1, 10):
        pages = manager(100, page_slots, (window_group(window),))
        for span in range(1, 9):
            most = max(len({p // page_slots for p in range(max(0, s - window + 1), s + span)}) for s in range(40))
            assert pages._peak(pages.pools[0], span) == most, (window, span)


def test_a_fork_in_a_window_group_needs_a_page_for_its_copy():
    pages = manager([10, 4], 4, (FULL, window_group(6)))
    parent, child = start(pages, 10), sequence(20, branch=1)
    assert pages.lacking(child, 9, 20, max_span=1, parent=parent) == [0, 1]


def test_promised_pages_are_not_given_twice():
    pages = manager(11, 4)
    first = sequence(32)
    pages.admit(first, 0)
    compute(pages, first, 8)
    promised = pages.missing(first, 32, 64)
    assert promised == [6]
    other = sequence([9] * 20)
    assert fits(pages, other, 0, 12) and not fits(pages, other, 0, 12, promised=promised)
    assert fits(pages, other, 0, 8, promised=promised)


def test_freed_by_counts_shared_pages_once_all_users_go():
    pages = manager(20, 4)
    a = start(pages, 10)
    b = sequence(10)
    pages.admit(b, 8)
    compute(pages, b)
    assert pages.freed_by([a]) == [1] and pages.freed_by([a, b]) == [4] and pages.freed_by([]) == [0]


# ------------------------------------------------------------------------------------------------------------ forks


def test_a_fork_shares_and_copies_on_write():
    pages = manager(20, 4)
    parent, child, copies = start(pages, 10), sequence(10, branch=1), []
    pages.fork(parent, child, 9)
    assert child.tables == parent.tables and child.num_computed == 9
    pages.check([parent, child])
    last = parent.tables[0][2]
    assert pages.grow(child, 10, copies)
    assert copies == [PageCopy(0, last, child.tables[0][2])] and parent.tables[0][2] == last != child.tables[0][2]
    assert pages.grow(parent, 11, copies) and len(copies) == 1, "alone again, the parent writes in place"


def test_the_device_hears_of_a_page_that_was_replaced():
    pages = manager()
    parent, child, copies = start(pages, 10), sequence(10, branch=1), []
    pages.fork(parent, child, 9)
    parent.num_sent = 3
    assert pages.grow(parent, 10, copies) and copies and parent.num_sent == 2
    pages.truncate(parent, 10)
    assert parent.num_sent == 2
    pages.release(parent)
    assert parent.num_sent == 0
    pages.check([parent, child])


def test_a_fork_at_a_page_boundary_copies_nothing():
    pages = manager(20, 4)
    parent, child, copies = start(pages, 9), sequence(9, branch=1), []
    pages.fork(parent, child, 8)
    assert pages.grow(child, 9, copies) and not copies


def test_a_copy_needs_a_page():
    pages = manager(4, 4)
    parent, child, copies = start(pages, 10), sequence(10, branch=1), []
    pages.fork(parent, child, 9)
    assert pages.lacking(child, 9, 10, parent=parent) == [1]
    assert not pages.grow(child, 10, copies) and not copies
    pages.check([parent, child])


def test_the_last_user_takes_an_indexed_page_back():
    pages = manager(4, 4)
    parent, child, copies = start(pages, 12), sequence(12, branch=1), []
    pages.fork(parent, child, 11)
    pages.release(parent)
    assert pages.match(sequence(13)) == 12
    assert pages.grow(child, 12, copies) and not copies
    assert pages.match(sequence(13)) == 8, "a page about to be written is no longer in the index"
    pages.check([child])


def test_a_window_that_moved_on_cannot_be_forked_from():
    pages = manager([30, 30], 4, (FULL, window_group(4)))
    parent = start(pages, 10)
    assert pages.can_fork(parent, 9) and not pages.can_fork(parent, 11)
    parent.tokens += [5] * 10
    compute(pages, parent, 19)
    assert not pages.can_fork(parent, 9)
    with pytest.raises(AssertionError):
        pages.fork(parent, sequence(10, branch=1), 9)


# ------------------------------------------------------------------------------------------------------------ limbo


def test_pages_that_a_launched_step_uses_return_when_it_retires():
    pages = manager(6, 4)
    seq = start(pages, 20)
    assert pages.num_free == 0
    pages.release(seq, after_step=3)
    assert pages.num_free == 0 and pages.num_limbo == 5
    pages.check([])
    pages.retire(2)
    assert pages.num_free == 0
    pages.retire(3)
    assert pages.num_free == 5 and pages.num_cached == 5 and not pages.num_limbo
    pages.check([])


def test_a_hit_brings_a_page_back_from_limbo():
    pages = manager(6, 4)
    pages.release(start(pages, 12), after_step=1)
    again = sequence(12)
    pages.admit(again, pages.match(again))
    assert again.num_computed == 8 and pages.num_limbo == 1
    pages.release(again, after_step=2)
    pages.retire(1)
    assert pages.num_limbo == 2, "a page that was given back again waits for the later step"
    pages.retire(2)
    assert pages.num_free == 5
    pages.check([])


@pytest.mark.parametrize("give_up", ["truncate", "commit"])
def test_look_ahead_and_window_pages_go_through_limbo_too(give_up):
    pages = manager(30, 4, (window_group(4),))
    seq = start(pages, 6)
    assert pages.grow(seq, 20, [])
    free = pages.num_free
    if give_up == "truncate":
        pages.truncate(seq, 7, after_step=5)
    else:
        seq.tokens += [1] * 14
        seq.num_computed = 20
        pages.commit(seq, after_step=5)
    assert pages.num_free == free and pages.num_limbo == (3 if give_up == "truncate" else 4)
    pages.check([seq])
    pages.retire(5)
    assert pages.num_free > free
    pages.check([seq])


# ----------------------------------------------------------------------------------- the checks can fail


def freed_early(pages, seq):
    pages.pools[0].drop([seq.tables[0][0]], None)


def in_two_places(pages, seq):
    pages.pools[0].free.append(seq.tables[0][0])


def lost(pages, seq):
    pages.pools[0].free.pop()


def wrong_tokens(pages, seq):
    seq.tokens[1] += 1


def dropped_from_a_table(pages, seq):
    page, seq.tables[0][0] = seq.tables[0][0], 0
    pages.pools[0].drop([page], None)


def miscounted(pages, seq):
    pages.pools[0].refs[seq.tables[0][0]] += 1


def stale_node(pages, seq):
    pages.pools[0].nodes[seq.tables[0][0]].pages[0] = 0


def indexed_too_early(pages, seq):
    seq.num_computed -= 4


def leaked_user(pages, seq):
    pages.index.tenant(seq).users += 1


@pytest.mark.parametrize(
    "damage",
    [
        freed_early,
        in_two_places,
        lost,
        wrong_tokens,
        dropped_from_a_table,
        miscounted,
        stale_node,
        indexed_too_early,
        leaked_user,
    ],
)
def test_check_sees(damage):
    pages = manager(10, 4)
    seq = start(pages, 12)
    pages.check([seq])
    damage(pages, seq)
    with pytest.raises(AssertionError):
        pages.check([seq])


def test_giving_back_twice_is_our_bug():
    pages = manager(10, 4)
    page = start(pages, 3).tables[0][0]
    pages.pools[0].drop([page], None)
    with pytest.raises(AssertionError, match="twice"):
        pages.pools[0].drop([page], None)


def test_the_model_of_the_tests_sees_a_page_freed_early():
    pages = manager(10, 4)
    model = FakeModel(pages)
    pages.pools[0]._on_free = model.poison
    seq = sequence(6)
    pages.admit(seq, 0)
    assert pages.grow(seq, 6, [])
    model.run([(Span(seq, 0, 5), seq.tokens[:5], seq.tables)])
    seq.num_computed = 5
    table = [list(t) for t in seq.tables]
    pages.release(seq)
    with pytest.raises(AssertionError, match="wrong slot"):
        model.run([(Span(seq, 5, 1), seq.tokens[5:], table)])


# ------------------------------------------------------------------------------ random forks at any depth, any place


@pytest.mark.parametrize("seed", range(12))
def test_random_forks_and_writes(seed):
    """Every sequence reads its own past only, with forks of forks at any position, parents that write on, truncates,
    and releases while steps are in flight."""
    rng = random.Random(seed)
    groups = [(FULL,), (FULL, window_group(7)), (window_group(4),)][seed % 3]
    size = rng.choice([1, 2, 4])
    pages = manager(1 + 60 // size, size, groups, None if seed % 4 == 0 else b"root")
    model = FakeModel(pages)
    for pool in pages.pools:
        pool._on_free = model.poison
    alive: list[Sequence] = []
    step, forks, refused = 0, 0, 0
    for turn in range(400):
        step += 1
        if len(alive) < 2:
            seq = sequence([rng.randrange(2) for _ in range(rng.randint(1, 12))], name=str(turn))
            pages.admit(seq, pages.match(seq))
            alive.append(seq)
        parent = rng.choice(alive)
        at = rng.randint(0, parent.num_computed)
        if len(alive) < 6 and at and pages.can_fork(parent, at):
            child = Sequence(request(parent.tokens[:at] + [rng.randrange(2)], name=str(turn)), 1)
            pages.fork(parent, child, at)
            alive.append(child)
            forks += 1
        for seq in rng.sample(alive, min(3, len(alive))):
            end = seq.num_tokens
            copies: list[PageCopy] = []
            grown = pages.grow(seq, end + rng.randint(0, 5), copies)
            refused += not grown
            if not grown or seq.num_computed == end:
                for copy in copies:
                    model._copy(Plan(step, [], [copy]))
                continue
            span = Span(seq, seq.num_computed, rng.randint(1, end - seq.num_computed))
            for copy in copies:
                model._copy(Plan(step, [], [copy]))
            model.run([(span, span.tokens(), seq.tables)])
            seq.num_computed += span.length
            pages.commit(seq, step)
            if rng.random() < 0.7:
                pages.truncate(seq, seq.num_tokens, step)
            seq.tokens += [
                rng.randrange(2) for _ in range(rng.randint(0, 3) if seq.num_computed == seq.num_tokens else 0)
            ]
        pages.check(alive)
        while len(alive) > 4 or (alive and (rng.random() < 0.1 or pages.num_free < 8)):
            pages.release(alive.pop(rng.randrange(len(alive))), rng.choice([None, step]))
        pages.check(alive)
        pages.retire(step - 1)
        pages.check(alive)
    for seq in alive:
        pages.release(seq)
    pages.retire(step)
    pages.check([])
    assert pages.num_free == pages.num_total and forks > 20
