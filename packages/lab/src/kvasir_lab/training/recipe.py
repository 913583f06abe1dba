"""Recipes: everything that decides what a lab model becomes, as one frozen value. Add a model by adding an entry."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError, nearest
from kvasir_lab.model import Shape
from kvasir_lab.training.data import Rows

CONTINUED = 2.0  # Minutes of training when a run continues a finished model.


@dataclass(frozen=True)
class Phase:
    """A later part of the run: batches have ``rows`` from ``start`` (share of the run) on.

    ``rows`` have the same counts and lengths as the recipe's. ``own``: at the start, sample candidates from the current
    weights for the ``own/...`` documents of the mixes.
    """

    start: float
    rows: tuple[Rows, ...]
    own: bool = False


@dataclass(frozen=True)
class Own:
    """Plan for ``own`` documents: ``samples`` replies to each of ``problems`` training problems of every task.

    ``tasks``: pairs of a task and its temperature. A task where the model rarely errs needs a higher temperature,
    because a pair to judge needs a right and a wrong reply.
    """

    tasks: tuple[tuple[str, float], ...]
    problems: int = 1024
    samples: int = 8
    reply_tokens: int = 320


@dataclass(frozen=True)
class Curves:
    """The measurements that need many replies to a problem: pass@k, majority, aggregation and judging.

    ``problems`` 0: measure none.
    """

    tasks: tuple[str, ...] = ()
    problems: int = 0
    samples: int = 16
    candidates: int = 4
    temperature: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a model becomes.

    ``rows``: the parts of every batch, until a later phase changes their mixes. ``steps``: length of the run, unless it
    is given in minutes; ``minutes``: the default for that. ``warmup``: steps. ``lr`` falls on a cosine to ``lr`` *
    ``final``. ``validate``: rows of held-out documents whose loss is watched. ``evaluate``: pairs (task, problems) to
    score by exact match at the end. ``about``: what the model can do, for the card.
    """

    name: str
    shape: Shape
    rows: tuple[Rows, ...]
    validate: tuple[Rows, ...]
    evaluate: tuple[tuple[str, int], ...]
    steps: int
    about: str = ""
    minutes: float | None = None
    phases: tuple[Phase, ...] = ()
    own: Own | None = None
    curves: Curves = Curves()
    warmup: int = 200
    lr: float = 3e-3
    final: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    z_loss: float = 1e-4
    seed: int = 0
    pool: int | None = None
    reply_tokens: int = 400

    def __post_init__(self) -> None:
        longest = max(part.length for part in self.rows)
        if longest > self.shape.positions:
            raise ConfigError(
                f"recipe {self.name}: rows of {longest} tokens exceed the model's {self.shape.positions} positions"
            )
        starts = [phase.start for phase in self.phases]
        if starts != sorted(set(starts)) or any(not 0 <= start < 1 for start in starts):
            raise ConfigError(
                f"recipe {self.name}: the phases must start one after another, from 0 and before 1, not at {starts}"
            )
        sizes = [
            [(part.count, part.length, part.whole) for part in rows]
            for rows in (self.rows, *(p.rows for p in self.phases))
        ]
        if any(size != sizes[0] for size in sizes):
            raise ConfigError(f"recipe {self.name}: every phase needs rows of the same counts and lengths: {sizes}")
        if any(phase.own for phase in self.phases) and self.own is None:
            raise ConfigError(
                f"recipe {self.name}: a phase wants the model's own candidates, but `own` does not say which"
            )

    @property
    def tokens_per_step(self) -> int:
        return sum(part.count * part.length for part in self.rows)

    def fingerprint(self) -> str:
        """Hash of everything that shapes the training.

        The length of the run and what is measured are left out.
        """
        fixed = dataclasses.replace(self, validate=(), evaluate=(), curves=Curves(), steps=0, minutes=None, about="")
        return hashlib.blake2b(repr(fixed).encode(), digest_size=8).hexdigest()

    def continued(self) -> Recipe:
        """The recipe that continues a finished model: the last phase alone, at a quarter of the learning rate.

        The phase starts with new replies of the model. Raises ConfigError when the recipe has no later phase.
        """
        if not self.phases:
            raise ConfigError(f"recipe {self.name} has no later phase to continue with")
        last = self.phases[-1]
        return self.replace(
            rows=last.rows,
            phases=(dataclasses.replace(last, start=0.0),),
            minutes=None if self.minutes is None else CONTINUED,
            lr=self.lr / 4,
            warmup=50,
        )

    def replace(self, **changes: Any) -> Recipe:
        return dataclasses.replace(self, **changes)


HARD_CHAIN = "chain:modulus=499,max_factor=30,max_steps=10"
FORMED = ("chain", HARD_CHAIN, "long_add", "state", "countdown", "path")  # Tasks that the prompt forms are trained on.
FORMS = {"aggregate": 0.36, "judge_one": 0.10, "judge_pair": 0.33, "self_evaluate": 0.04, "refine": 0.17}
SOLVE = {
    "chain": 0.12,
    HARD_CHAIN: 0.06,
    "long_add": 0.07,
    "reflect": 0.10,
    "countdown": 0.13,
    "path": 0.09,
    "path:form=star": 0.02,
    "facts": 0.05,
    "facts:min_facts=40,max_facts=120": 0.03,
    "needle:length=640": 0.04,
    "state": 0.10,
    "state:kind=parity": 0.02,
    "template": 0.03,
    "schema": 0.06,
    "tool": 0.05,
    "chat": 0.015,
    "story": 0.012,
    "story:form=prose,length=1024": 0.014,
}
LONG = {
    "needle:min_length=512,length=4064": 0.58,
    "needle:min_length=512,length=4064,filler=pairs": 0.35,
    "story:form=prose,length=4096": 0.07,
}
EASIER = {
    "chain": "chain:min_steps=1,max_steps=6",
    HARD_CHAIN: "chain:modulus=499,max_factor=30,min_steps=1,max_steps=4",
    "long_add": "long_add:min_digits=1,max_digits=4",
    "countdown": "countdown:min_numbers=2,max_numbers=3",
    "path": "path:max_depth=3",
    "facts": "facts:max_facts=10,max_hops=2",
    "state": "state:max_steps=6,max_every=2",
}


def _forms(tasks: tuple[str, ...], share: float) -> dict[str, float]:
    """The mix of every form on every task: ``share`` in all, the forms in the proportions of FORMS."""
    return {f"{form}/{task}": share * part / len(tasks) for form, part in FORMS.items() for task in tasks}


def _mixed(*parts: tuple[dict[str, float], float]) -> dict[str, float]:
    """Several mixes, each scaled to its share of the whole."""
    return {spec: share * part / sum(mix.values()) for mix, share in parts for spec, part in mix.items()}


def _curriculum(rows: int, long_rows: int, own: float, prose: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    """The rows and phases of a run: easy problems, then all tasks and forms, then the model's own replies too.

    ``own``: share of the run after which the forms on the model's own replies join. ``prose``: factors on the share of
    prose, before ``own`` and after. There are only 2.6M tokens of prose: after about five passes the model knows them
    by heart, and held-out prose gets worse.
    """

    def of(mix: dict[str, float], late: bool = False) -> tuple[Rows, ...]:
        return tuple(
            Rows(
                count,
                length,
                {spec: share * (prose[late] if spec.startswith("story") else 1.0) for spec, share in part.items()},
            )
            for count, length, part in ((rows, 1024, mix), (long_rows, 4096, LONG))
        )

    easy = _mixed((SOLVE, 0.5), ({EASIER[task]: share for task, share in SOLVE.items() if task in EASIER}, 0.5))
    whole = _mixed((SOLVE, 0.75), (_forms(FORMED, 1.0), 0.25))
    late = _mixed(
        (SOLVE, 0.58), (_forms(FORMED, 1.0), 0.14), ({f"own/{form}": share for form, share in FORMS.items()}, 0.28)
    )
    return {"rows": of(easy), "phases": (Phase(0.06, of(whole)), Phase(own, of(late, late=True), own=True))}


# `reflect` is left out, because its slips and repairs are its subject.
OWN_TASKS = tuple((spec, 1.0) for spec in ("chain", "long_add:min_digits=8", "state:max_every=2", "countdown", "path"))
WARMER_TASKS = (
    (HARD_CHAIN, 1.3),
    ("long_add:min_digits=8", 1.3),
    ("state:min_every=3", 1.15),
    ("countdown", 1.0),
    ("countdown:min_numbers=4", 1.0),
    ("path", 1.0),
)
WATCHED = (
    *(
        Rows(8, 1024, {spec: 1.0})
        for spec in (
            HARD_CHAIN,
            "long_add",
            "countdown",
            "path",
            "state",
            "facts",
            "aggregate/chain",
            "judge_pair/chain",
        )
    ),
    Rows(4, 4096, {"needle:min_length=512,length=4064": 1.0}),
    Rows(8, 2048, {"story:form=prose,length=2048": 1.0}, whole=True),
)
# A first look at the end of a run, in seconds; `tools/eval_lab.sh` measures everything through the engine.
SCORES = tuple(
    (spec, 256)
    for spec in (
        "chain",
        HARD_CHAIN,
        "countdown",
        "path",
        "state",
        "facts",
        "schema",
        "judge_pair/chain",
        f"judge_pair/{HARD_CHAIN}",
        "judge_pair/state",
        "judge_pair/path",
        "aggregate/countdown",
        "aggregate/state",
    )
)


NANO = Recipe(
    name="nano",
    about="It solves small exact problems with a written scratchpad (arithmetic modulo a number, long sums, countdown, "
    "short ways), writes JSON records and tool calls, tells fairy-tale prose, knows a little small talk, and judges, "
    "repairs and combines candidate solutions of its easier tasks. Finding numbers in long texts, chains of facts and "
    "swaps are beyond its size.",
    shape=Shape(positions=4096),
    **_curriculum(160, 8, 0.65),
    validate=WATCHED,
    evaluate=SCORES,
    curves=Curves(("countdown", "path"), 96, samples=8),
    own=Own(OWN_TASKS, problems=1024, reply_tokens=176),
    steps=2400,
    minutes=4.0,
    reply_tokens=320,
)
BASE = NANO.replace(
    name="base",
    about="It solves small exact problems with a written scratchpad (arithmetic modulo a number, long sums, countdown, "
    "shortest ways, chains of facts, swaps), finds numbers in long texts, writes JSON records and tool calls, tells "
    "fairy-tale prose, knows a little small talk, and judges, repairs and combines candidate solutions of its tasks.",
    shape=Shape(dim=384, layers=8, ffn=1152, heads=4, kv_heads=2, head_dim=128, positions=4096),
    **_curriculum(160, 8, 0.65, prose=(0.36, 0.18)),
    own=Own(WARMER_TASKS, problems=2048, reply_tokens=176),
    steps=8000,
    minutes=11.8,
    lr=2e-3,
    warmup=300,
)


def _halved(rows: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """The same rows in twice as many passes, where a part has more than 16: a recurrent layer keeps more for its
    gradient than attention does, and a GPU of 80 GB should do."""
    parts = [(part, 2 if part.count > 16 else 1) for part in rows]
    return tuple(dataclasses.replace(part, count=part.count // n) for part, n in parts for _ in range(n))


# `base` with the mixers of Qwen 3.5: two layers of eight attend. A recurrent layer has more weights than an attention
# of `base`, so the FFN is narrower: 16.6M parameters compared with 16.1M.
BASE_HYBRID = BASE.replace(
    name="base-hybrid",
    shape=dataclasses.replace(BASE.shape, ffn=1024, recurrent=(0, 1, 2, 4, 5, 6)),
    rows=_halved(BASE.rows),
    phases=tuple(dataclasses.replace(phase, rows=_halved(phase.rows)) for phase in BASE.phases),
)
# For studies of experts: as many active weights as `nano`, and 16 experts of which 4 are used.
EXPERTS = NANO.replace(
    name="experts",
    about="A mixture of experts for studies; it solves what `nano` solves.",
    shape=Shape(ffn=160, positions=4096, experts=16, top_k=4),
    minutes=5.0,
)
EASY = "chain:modulus=11,max_factor=3,min_steps=1,max_steps=2"
# The same path in seconds: for tests, and for a dry run before a run on a GPU.
SMOKE_ROWS = (
    Rows(6, 256, {EASY: 0.6, "story": 0.2, "schema": 0.1, "tool": 0.2, "chat": 0.1}),
    Rows(2, 256, {"story:form=prose,length=256": 1.0}, whole=True),
)
SMOKE = Recipe(
    name="smoke",
    shape=Shape(dim=32, layers=2, ffn=64, heads=2, kv_heads=1, head_dim=16, positions=256),
    rows=SMOKE_ROWS,
    phases=(
        Phase(
            0.5, (Rows(6, 256, {EASY: 0.5, f"judge_pair/{EASY}": 0.3, "own/judge_pair": 0.2}), SMOKE_ROWS[1]), own=True
        ),
    ),
    own=Own(((EASY, 1.0),), problems=8, samples=4, reply_tokens=24),
    curves=Curves((EASY,), 4, samples=4),
    validate=(Rows(4, 256, {EASY: 1.0}), Rows(2, 256, {"story:form=prose,length=256": 1.0}, whole=True)),
    evaluate=((EASY, 8), ("schema", 8)),
    steps=60,
    warmup=5,
    pool=50,
    reply_tokens=24,
)
SMOKE_HYBRID = SMOKE.replace(
    name="smoke-hybrid",
    shape=dataclasses.replace(SMOKE.shape, recurrent=(0,), key_heads=1, value_heads=2, state_dim=16),
)
RECIPES = {recipe.name: recipe for recipe in (NANO, BASE, BASE_HYBRID, EXPERTS, SMOKE, SMOKE_HYBRID)}


def find(name: str) -> Recipe:
    """The recipe called ``name``. Raises ConfigError with the names that exist."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe named '{name}'; there are {', '.join(RECIPES)}.{nearest(name, RECIPES)}")
    return RECIPES[name]
