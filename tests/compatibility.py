"""What works with what, tried out: every drafter and every codec with every kind of request and with each other, on the smallest model.

A cell says *same* when all tokens and log-probabilities are those of the plain engine over the same codec, one request at a time, to the
bit (CPU exact mode), while prompts come in chunks, prefixes are shared, pages are few and sequences preempted. `tools/compatibility.py`
writes the page; `tests/test_compatibility.py` holds it to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.config import EngineConfig
from kvasir.engine.build import CODECS
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError
from kvasir.speculation.drafter import DRAFTERS
from kvasir.technique import names
from kvasir.types import Grammar
from tests.engine.driver import Driver

FEW = [310, 311, 312, 313]
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "T = 1": dict(),
    "top-k, top-p, min-p": dict(top_k=20, top_p=0.9, min_p=0.02),
    "n = 3": dict(n=3),
    "penalties": dict(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias, allowed, banned": dict(logit_bias={310: 2.0}, allowed_token_ids=FEW),
    "stop ids, min_tokens": dict(temperature=0.3, ignore_eos=False, stop_token_ids=FEW, min_tokens=6),
    "log-probabilities": dict(logprobs=3, logprobs_mode="processed", top_p=0.9),
    "scored prompt": dict(prompt_logprobs=1),
    "grammar": dict(grammar=Grammar("regex", "(ab|ba|c)*")),
}
SPECS = {"ngram": "ngram:min_match=1", "suffix": "suffix:min_match=1", "draft_model": "draft_model:model=nano", "layer_skip": "layer_skip:exits=1+2"}
HEADS = ("medusa", "eagle", "ppd")
FOR_BENCHMARKS = ("replay",)
REFUSED: tuple[dict[str, Any], ...] = (
    {"kv_codec": "bfloat16"},
    {"drafter": "draft_model:model=nano,max_accept=true", "batch_invariant": True},
    {"drafter": "draft_model:model=nano,max_accept=true+suffix"},
    {"drafter": "suffix+suffix"},
    {"drafter": "draft_model"},
    {"drafter": "layer_skip:exits=99"},
    {"kv_codec": "int4_bdr:order=48"},
    {"batch_invariant": True, "fused_kernels": False},
)


def drafters() -> list[str]:
    return [name for name in names(DRAFTERS) if name not in FOR_BENCHMARKS]


def codecs() -> list[str]:
    return ["plain", *(name for name in names(CODECS) if name != "plain")]


def given(d: Driver) -> list:
    """One request a feature; prompts begin alike, and some repeat themselves."""
    shared = [300 + (7 * i) % 1200 for i in range(40)]
    usual = dict(max_tokens=12, ignore_eos=True, logprobs=0)
    return [d.request(name, [*shared[:20 + 2 * k], *([320, 321, 322] * 4), 400 + k], **(usual | {"seed": k} | params))
            for k, (name, params) in enumerate(FEATURES.items())]


def found(d: Driver) -> dict[str, list]:
    """By feature, all that a reader gets."""
    assert not d.errors, d.errors
    answers: dict[str, list] = {name: [] for name in FEATURES}
    for (name, branch), out in sorted(d.outputs.items()):
        scored = [p and p.logprob for p in out.prompt_logprobs or []]
        answers[name].append((branch, out.tokens, [(p.id, p.logprob, p.top) for p in out.logprobs], scored))
    return answers


def alone(codec: str) -> dict[str, list]:
    d = Driver(max_num_batched_tokens=512, max_num_seqs=8, enable_prefix_caching=False, kv_codec=codec, max_model_len=112)
    for request in given(d):
        d.run([request])
    answers = found(d)
    d.close()
    return answers


def together(drafter: str, codec: str) -> dict[str, list]:
    d = Driver(max_num_batched_tokens=48, max_num_seqs=6, kv_codec=codec, drafter=drafter, draft_control="fixed", max_model_len=112, page_slots=16,
               num_pages=24)
    d.run(given(d), preempt_every=5)
    assert not drafter or d.engine.stats().drafted_tokens and not d.engine._drafting._failures
    answers = found(d)
    d.close()
    return answers


class Trial:
    """``heads``: folders of the trained drafters. References are made once a codec."""

    def __init__(self, heads: dict[str, Path]) -> None:
        self.specs = SPECS | {name: f"{name}:model={folder}" for name, folder in heads.items()}
        self._alone: dict[str, dict[str, list]] = {}

    def row(self, drafter: str, codec: str) -> dict[str, str]:
        """By feature: "same" or "differs"."""
        if codec not in self._alone:
            self._alone[codec] = alone(codec)
        answers = together(self.specs.get(drafter, drafter), codec)
        return {name: "same" if answers[name] == self._alone[codec][name] else "**differs**" for name in FEATURES}


def refusal(options: dict[str, Any]) -> str:
    """The engine's own words. Raises AssertionError where it starts."""
    try:
        Engine(EngineConfig.of(model="nano", device="cpu", **options)).close()
    except ConfigError as e:
        return str(e)
    raise AssertionError(f"{options} was not refused")


def as_flags(options: dict[str, Any]) -> str:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags.append(f"--{flag}" if value is True else f"--no-{flag}" if value is False else f"--{flag} {value}")
    return " ".join(flags)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def refusals() -> str:
    return table(["`kvasir serve nano --device cpu` and", "answer"], [[f"`{as_flags(o)}`", " ".join(refusal(o).split())] for o in REFUSED])


def page(trial: Trial) -> str:
    """The whole of docs/compatibility.md."""
    rows = [(name, "plain") for name in drafters()] + [("", name) for name in codecs()]
    features = [[f"`{drafter or codec}`", *trial.row(drafter, codec).values()] for drafter, codec in rows]
    pairs = []
    for drafter in drafters():
        cells = [trial.row(drafter, codec) for codec in codecs()]
        pairs.append([f"`{drafter}`", *("same" if set(c.values()) == {"same"} else "**differs**" for c in cells)])
    return "\n\n".join([
        "# What works with what",
        "Generated by `tools/compatibility.py`, which tries everything on the smallest model (CPU exact mode), while prompts come "
        "in chunks, prefixes are shared, pages are few and sequences are preempted. *Same*: all tokens and log-probabilities are "
        "those of the plain engine over the same codec, one request at a time, to the bit. What cannot work is refused at start- "
        "up.",
        "## Drafters and codecs, with every kind of request", table(["", *FEATURES], features),
        "## Drafters over codecs, all these requests together", table(["", *(f"`{c}`" for c in codecs())], pairs),
        "## Refused", refusals(),
        "More of it: backends and codecs on a GPU in [the 4-bit cache](methods/int4-kv.md), what strategies need of an endpoint in "
        "[test-time scaling](methods/test-time-scaling.md)."]) + "\n"
