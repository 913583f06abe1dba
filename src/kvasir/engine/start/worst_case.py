"""The step that needs the most memory, run once at the start to measure it."""

from __future__ import annotations

from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.schedule.spans import next_span
from kvasir.engine.ways.runner import Runner
from kvasir.types import CacheGroup, PageCopy, Plan, PoolingParams, Request, SamplingParams, Sequence


def worst_case_step(make_runner, sizes: dict, groups: tuple[CacheGroup, ...]) -> Runner:
    """Run one full prompt chunk and one full batch of decodes, with every sampling feature on, on a pool that is just
    big enough. Returns the runner, with all seats closed."""
    slots, rows = sizes["page_slots"], min(sizes["max_rows"], sizes["max_model_len"])
    pages = pages_for(rows, slots) + 1
    # Sequences may share states here: the numbers mean nothing.
    runner = make_runner(tuple(pages + 1 if group.kind == "pages" else 3 for group in groups))
    params = SamplingParams(
        temperature=0.8, top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logprobs=5
    )

    pooler = runner.parts.pooler
    pooling = None if pooler is None else PoolingParams(rows=pooler.pooling.rows)

    def sequence(seat: int, length: int) -> Sequence:
        request = Request(id=f"profile-{seat}", prompt_ids=[1] * length, params=params, seed=seat, max_tokens=1)
        request.pooling = pooling
        seq = Sequence(request)
        seq.tables = [list(range(1, pages_for(length, slots) + 1)) for _ in groups]
        seq.seat = seat
        runner.open(seq)
        return seq

    def run(seqs: list[Sequence], length: int) -> None:
        runner.pool.copy([PageCopy(0, 1, pages)])
        spans = [next_span(s, length) for s in seqs]
        for span in spans:
            span.states = (1, 2)
        runner.launch(Plan(0, spans)).read()
        for seq in seqs:
            runner.close(seq.seat)

    run([sequence(0, rows)], rows)
    run([sequence(seat, 1) for seat in range(min(sizes["max_num_seqs"], sizes["max_rows"]))], 1)
    return runner
