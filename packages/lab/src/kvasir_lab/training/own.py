"""Training documents made from a model's own replies, which the exact checker tells right from wrong.

Small models cannot judge or combine candidates by instruction alone, and candidates written by a task slip in other
ways than the model does. So late in a run the weights are sampled, and the prompt forms (aggregate, judge, refine, ...)
are trained on the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvasir_lab.evaluation.replies import Replies, choose, sample_replies
from kvasir_lab.forms import DRAWN, FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.task import Documents, Problem, encode
from kvasir_lab.training.data import OWN
from kvasir_lab.training.recipe import Own
from kvasir_lab.training.workers import all_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OWN_FORMS = ("aggregate", "judge_one", "judge_pair", "self_evaluate", "refine")
# Cases that a form makes of one problem; 1 where not listed.
PER_PROBLEM = {"aggregate": 3, "judge_pair": 3, "judge_one": 2, "refine": 2}
# The number of right candidates that a form sees more often than the others, and how often. A judge must tell two
# apart, and a model that combines candidates must not learn to trust that one of them is right.
FAVOURED = {"judge_pair": (1, 0.5), "aggregate": (0, 0.4), "refine": (0, 0.3)}
LONGEST = 1024  # Most tokens of a document.
OTHERS = 4  # Another model adds one reply for this many of the model's own.
CHUNK = 64  # Problems that one worker makes documents of at a time.


def cases(rng: np.random.Generator, task: FormTask, replies: Replies) -> list[Problem]:
    """Training problems of one form on these replies.

    Every possible number of right candidates is equally likely, apart from the preference in FAVOURED.
    """
    out = []
    for _ in range(PER_PROBLEM.get(task.form, 1)):
        count = int(rng.integers(max(task.shape.least, 1), min(task.shape.most, DRAWN) + 1))
        possible = [
            n
            for n in range(count + 1)
            if sum(replies.right) >= n and len(replies.right) - sum(replies.right) >= count - n
        ]
        # A problem whose replies are all right or all wrong says little, so most of these are left out.
        if not possible or (len(possible) == 1 and rng.random() < 0.7):
            continue
        wanted, often = FAVOURED.get(task.form, (0, 0.0))
        if wanted not in possible or rng.random() >= often:
            wanted = possible[rng.integers(len(possible))]
        candidates = choose(rng, replies, wanted, count)
        if candidates is not None:
            out.append(task.case(replies.problem, candidates))
    return out


def own_documents(
    model: Model,
    tokenizer: Tokenizer,
    plan: Own,
    seed: int,
    workers: int,
    say: Callable[[str], None],
    others: Sequence[Model] = (),
) -> dict[str, Documents]:
    """Sample the model on training problems and make the documents of every form, by name (``own/aggregate``, ...).

    Each has at most ``LONGEST`` tokens. A form for which the replies give no document is left out. ``others`` add a few
    replies to each problem, for their mistakes.
    """
    pool: list[tuple[str, Replies]] = []
    for i, (spec, temperature) in enumerate(plan.tasks):
        begin = time.monotonic()
        parts = [
            sample_replies(
                one,
                tokenizer,
                load_task(spec),
                "train",
                problems=plan.problems,
                samples=samples,
                temperature=temperature,
                max_new=plan.reply_tokens,
                seed=1000 * seed + i,
            )
            for one, samples in [(model, plan.samples), *((other, max(1, plan.samples // OTHERS)) for other in others)]
        ]
        pool += [(spec, Replies.join(replies)) for replies in zip(*parts, strict=True)]
        shares = ", ".join(f"{np.mean([r.right for r in part]):.1%}" for part in parts)
        say(f"  own replies: {spec} {shares} right, {time.monotonic() - begin:.1f} s")
    chunks = [(first, pool[first : first + CHUNK]) for first in range(0, len(pool), CHUNK)]
    made = all_of(partial(_written, tokenizer, seed), chunks, workers)
    parts = {form: [part[form] for part in made if form in part] for form in OWN_FORMS}
    for form in [form for form, documents in parts.items() if not documents]:
        say(f"  own replies give no document for {form}: the other documents take its share")
    return {OWN + form: Documents.join(documents) for form, documents in parts.items() if documents}


def _written(tokenizer: Tokenizer, seed: int, chunk: tuple[int, Sequence[tuple[str, Replies]]]) -> dict[str, Documents]:
    """The documents of every form on the replies of one chunk of problems."""
    first, pool = chunk
    rng = np.random.default_rng([seed, first])
    tasks = {
        (form, spec): FormTask(form, load_task(spec))
        for spec in dict.fromkeys(spec for spec, _ in pool)
        for form in OWN_FORMS
    }
    out = {}
    for form in OWN_FORMS:
        problems = [problem for spec, replies in pool for problem in cases(rng, tasks[form, spec], replies)]
        documents = encode(tokenizer, [p.segments() for p in problems]) if problems else None
        if documents is not None and (fitting := np.flatnonzero(documents.lengths <= LONGEST)).size:
            out[form] = documents.take(fitting)
    return out
