"""The order of a client: parameters, and the request that everything else can be rebuilt from. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvasir.types.pooling import PoolingParams

U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output.

    ``text``: the JSON schema, regex, Lark, or EBNF grammar (``root ::= ...``, as GBNF writes it), or a JSON list of
    choices. ``whitespace`` between the tokens of JSON: ``short`` (at most a blank, or a new line with indentation),
    ``any``, or ``fixed`` (one line, with the separators ", " and ": ").
    ``after``: token ids of the end-of-reasoning mark; if not empty, the grammar starts once they have been generated.
    ``parts``: names and JSON schemas of parts of the text, so that an error can name the one at fault.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]
    text: str = ""
    after: tuple[int, ...] = ()
    whitespace: Literal["short", "any", "fixed"] = "fixed"
    parts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters: the OpenAI and vLLM parameters by their usual names. Ranges are checked once, at admission.

    ``max_tokens=None`` means "up to the context length". ``temperature=0`` is greedy (lowest id wins a tie).
    ``seed=None`` draws a new stream. ``logprobs``: number of alternatives to report in addition to the sampled token.
    ``logprobs_mode``: ``raw`` (the model's distribution) or ``processed`` (after the whole pipeline).
    ``num_draft_tokens``: most tokens to draft a step (0: none). ``drafter``: the drafter to use, where several run.
    Neither changes a token in exact mode; elsewhere a tie may end differently.
    ``confidence`` k > 0: report, with every log-probability, the mean negative log-probability of the k likeliest
    tokens (Fu et al. 2025, DeepConf).
    ``score_from``: score the prompt's tokens from this position on and return them summed up as one `PromptScore`.
    ``confidence_window``: width of its windows in tokens (0: no window). ``finish_after`` m: only the first m branches
    to stop by themselves count, by tokens and not by time; a branch that can no longer be among them is cancelled.
    ``lease``: seconds to keep the pages of an ended branch for a request that goes on from it, unless others need them.
    ``thinking_token_budget``: most tokens of thinking, after which its end is forced. ``processors``: specs of logit
    processors (``name:key=value``), applied in this order. ``hook``: name of the set of hooks that acts on the hidden
    states. ``hook_strength``: factor on what it does, 0 to 8; 0: off. ``learn``: False keeps this request out of what a
    drafter learns from, where one does. ``kv_policy``: "off" keeps the whole cache of this request where the server
    forgets tokens; ``key=value,key=value`` changes parameters of its policies (`kvasir.kv.policy`).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    num_draft_tokens: int | None = None
    confidence: int = 0
    confidence_window: int = 0
    finish_after: int | None = None
    lease: float = 0.0
    score_from: int | None = None
    drafter: str | None = None
    thinking_token_budget: int | None = None
    processors: tuple[str, ...] = ()
    hook: str | None = None
    hook_strength: float = 1.0
    learn: bool = True
    kv_policy: str | None = None

    def __post_init__(self) -> None:
        # As in vLLM, callers may pass lists and single strings; they are stored as tuples.
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "processors"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, Iterable)):
                raise TypeError(f"{name} is {value!r}, expected a list")
            if value is not None or name != "allowed_token_ids":
                value = (value,) if isinstance(value, str) and value else tuple(value or ())
                object.__setattr__(self, name, value)
        if not isinstance(self.logit_bias or {}, Mapping):
            raise TypeError(f"logit_bias is {self.logit_bias!r}, expected token ids with their biases")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))


@dataclass(frozen=True, slots=True)
class Variant:
    """A set of changes to the model that computes a request's rows: a LoRA adapter, or a set of hooks.

    ``name``: as it is served. ``key``: hex digest of its content, so that other bytes under the same name are another
    variant. ``start``: the first position that it computes; rows before it run on the base model.
    ``changes_kv``: whether keys and values of its rows differ from the base model's. ``strength``: factor on what a
    set of hooks does.
    """

    name: str
    key: str
    start: int = 0
    changes_kv: bool = True
    strength: float = 1.0

    @property
    def resident(self) -> str:
        """The key of what lies in a slot of the device: a set of hooks lies there with its strength."""
        return self.key if self.strength == 1 else f"{self.key}*{self.strength!r}"

    def kv_key(self, end: int) -> str:
        """The key of what changed keys and values of positions before ``end``; "": nothing did. It names the first
        position, too: a prompt may hold what was an answer before."""
        if not self.changes_kv or end <= self.start:
            return ""
        return f"{self.resident}@{self.start}" if self.start else self.resident


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks of one answer's thinking: their token ids, where the prompt ends, and the text of the end mark."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    prompt_ends: Literal["before", "inside", "after"] = "before"
    end_text: str = ""


@dataclass(frozen=True, slots=True)
class ProcessorParams:
    """A logit processor of a request: its spec, the token ids of its texts by name, and how the answer thinks (None: it
    has no marks of thinking)."""

    spec: str
    ids: dict[str, tuple[int, ...]]
    thinking: Thinking | None = None


@dataclass(slots=True, kw_only=True)
class Request:
    """The durable state of one request. The engine can rebuild everything else from it, on any machine, at any time.

    ``seed``: the u64 noise stream of branch 0. ``max_tokens``: resolved against the context length. ``tenant``: salt of
    the prefix key, from the authenticated identity. ``arrival``: ``time.monotonic()`` seconds. ``bad_words``: ids.
    ``affinity``: name that requests of one problem share; some scheduler policies keep them together.
    ``piece``: number of tokens that may leave the engine together; 1 where a client reads them as they come.
    ``bare``: whether log-probabilities are wanted as plain numbers (`Event.bare`), without ranks and alternatives.
    ``variant``: the adapter that computes it; None: the base model. ``hook``: the set of hooks that acts on its rows;
    None: no hook does.
    ``processors``: its logit processors, in order, with their texts as token ids.
    ``pooling``: an embedding or a score of the prompt is wanted, and no tokens (None: tokens are).
    ``epoch``: number of re-submissions. ``emitted``, ``ended``: what earlier epochs delivered, by branch.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    arrival: float = 0.0
    tenant: str = ""
    bad_words: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    emitted: list[list[int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    affinity: str = ""
    piece: int = 1
    bare: bool = False
    variant: Variant | None = None
    hook: Variant | None = None
    pooling: PoolingParams | None = None
    processors: list[ProcessorParams] = field(default_factory=list)

    def kv_variant(self, end: int) -> str:
        """The content keys of the adapter and the hooks that changed keys and values of positions before ``end``; "":
        none did."""
        if self.hook is None:
            return "" if self.variant is None else self.variant.kv_key(end)
        keys = "" if self.variant is None else self.variant.kv_key(end), self.hook.kv_key(end)
        return " ".join(keys) if any(keys) else ""
