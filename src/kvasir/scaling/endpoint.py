"""The protocol of a model to scale over: an engine here, a server anywhere, or a table in a test.

An endpoint declares its capabilities (``Caps``) and a strategy lists those it needs, so an impossible pair is refused
before the first call. ``draw`` streams n samples of a prompt piece by piece. Rules that decide between running samples
(``Group``) are written once, over that stream, in ``collect``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvasir.decoding.confidence import summed_up
from kvasir.errors import ConfigError, nearest
from kvasir.scaling.ledger import Price

Finish = Literal["stop", "length", "cancelled", "group"]
Messages = Sequence[Mapping[str, Any]]


class EndpointError(Exception):
    """A call failed through no fault of its own, so it can be tried again.

    ``retry_after``: seconds to wait before that.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """The endpoint will never serve this call, for example because the prompt exceeds its context."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Capabilities of an endpoint.

    ``tokens``: token ids go in and out, so a reply can be continued, forked and cut (`Seq`). ``logprobs``: confidence
    of generated tokens. ``score``: confidence of any text. ``choose``: a distribution over given next tokens. ``fork``:
    n samples compute the prompt once. ``schema`` and ``bound``: what a `Shape` asks for. ``reward``: its scores are
    those of a reward model (`Score.reward`). ``writes``: it writes solutions, which neither a reward model does nor a
    model that a run has for its judgement alone.
    """

    tokens: bool = False
    logprobs: bool = False
    score: bool = False
    choose: bool = False
    fork: bool = False
    schema: bool = False
    bound: bool = False
    reward: bool = False
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to continue.

    ``begun``: token ids of the reply so far (for `Seq`). ``affinity``: the problem that the prompt belongs to. Prompts
    of one problem share beginnings, so they should go to one replica. ``prepared``: what endpoints keep of it.
    """

    messages: tuple[Mapping[str, Any], ...]
    begun: tuple[int, ...] = ()
    affinity: str = ""
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class Shape(NamedTuple):
    """Constraints on a reply. ``schema``: JSON schema, as text, that it follows. ``limit``, ``mark``: the text ``mark``
    is forced once ``limit`` tokens were written without it."""

    schema: str = ""
    limit: int = 0
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings.

    ``stop``: strings that end a reply and stay in it (a step's delimiter). ``temperature`` 0 is greedy.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    shape: Shape | None = None


@dataclass(slots=True)
class Chunk:
    """The next ``count`` tokens of sample ``index``: text, ids, log-probabilities and confidences (empty: not known).

    A chunk has several tokens only when nothing is decided between them; a rule that must see single tokens (`Group`)
    gets them one by one. ``finish``: why the sample ended, sent with the last token or after it (then ``count`` is 0).
    ``whole``: the complete sample with the last chunk, when it is known already (in a pool).
    """

    index: int
    text: str = ""
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    confidences: Sequence[float] = ()
    finish: Finish | None = None
    count: int = 1
    whole: Sample | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample.

    ``tokens`` counts the generated tokens, end mark included. ``ids`` are empty when the endpoint hides them.
    ``confidence``: mean over the tokens of the mean negative log-probability of the k likeliest next tokens; larger
    means surer (DeepConf, Fu et al. 2025). ``lowest``: the lowest mean over a window of tokens. ``logprob``: sum over
    the tokens. ``met``: number of tokens after which the sample met the group's rule.
    """

    index: int
    text: str
    tokens: int
    finish: Finish
    endpoint: str = ""
    vocabulary: str = ""
    ids: tuple[int, ...] = ()
    confidence: float | None = None
    logprob: float | None = None
    met: int | None = None
    lowest: float | None = None


FIELDS = tuple(f.name for f in dataclasses.fields(Sample))


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a given text under a prompt.

    ``confidence``, ``lowest`` and ``logprob`` as in `Sample`; ``tokens``: number of scored tokens. ``reward``: the
    score of a reward model, from 0 to 1, which has no other one.
    """

    confidence: float
    logprob: float
    tokens: int
    lowest: float | None = None
    reward: float | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a call, filled in while it runs.

    ``uncached`` and ``cached`` count the prompt, ``overrun`` tokens that were generated after a sample had ended.
    """

    uncached: int = 0
    cached: int = 0
    overrun: int = 0


class Draw(abc.ABC):
    """n samples in progress: iterate to get their chunks.

    ``cancel`` ends some of them; each then sends a last chunk.
    """

    def __init__(self) -> None:
        self.usage = Usage()

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    @abc.abstractmethod
    async def cancel(self, indexes: Sequence[int]) -> None: ...

    async def aclose(self) -> None:  # noqa: B027
        """End everything that still runs."""


class Endpoint(abc.ABC):
    """A model that strategies can call.

    ``parameters``: active ones, for counting operations (0: unknown). ``vocabulary``: equal for endpoints whose token
    ids mean the same. ``window``: tokens of a confidence's window. It is short because the lab's solutions are; the
    paper's 2048 suit replies of tens of thousands of tokens.
    """

    name: str
    caps = Caps()
    price = Price()
    parameters = 0
    vocabulary = ""
    window = 16

    async def start(self) -> None:  # noqa: B027
        """Get ready. Raises ConfigError when that is impossible."""

    async def close(self) -> None:  # noqa: B027
        """Release everything."""

    async def busy_seconds(self) -> float | None:
        """Seconds that its device has worked since the start; None when unknown."""
        return None

    def forget(self) -> None:  # noqa: B027
        """Stop finding what was computed until now in a prefix cache, where possible.

        Arms of a comparison then begin alike.
        """

    async def prepare(self, prompt: Prompt) -> None:  # noqa: B027
        """Do what takes long before the methods below may be called with this prompt, and not on the event loop.
        Raises Refused for a prompt that cannot be encoded."""

    @abc.abstractmethod
    def draw(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, group: Group | None = None) -> Draw:
        """Sample ``n`` replies.

        If the endpoint supports seeds, sample i of a seed is the same for every n. ``group`` says which samples will
        count. An endpoint may pass it to its engine, so that losers end at once, or leave it to `collect`. Iterating
        raises EndpointError or Refused.
        """

    @abc.abstractmethod
    def most_prompt_tokens(self, prompt: Prompt) -> int:
        """An upper bound of the prompt's tokens, for budgets. Raises Refused for a prompt that cannot be encoded."""

    async def score(self, prompt: Prompt, sample: Sample, usage: Usage) -> Score:
        """Score ``sample`` as the reply to ``prompt``."""
        raise Refused(f"{self.name} cannot score")

    async def choose(self, prompt: Prompt, options: Sequence[str], usage: Usage) -> dict[str, float]:
        """Log-probability of each option as the next token; the options' probabilities sum to 1."""
        raise Refused(f"{self.name} cannot choose")


def short(model: str) -> str:
    """The name of a model that is given by its name or its folder."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def find(endpoints: Sequence[Endpoint], name: str) -> Endpoint:
    """The endpoint called ``name``, which may be its folder. Raises ConfigError."""
    for endpoint in endpoints:
        if endpoint.name in (name, short(name)):
            return endpoint
    names = [e.name for e in endpoints]
    raise ConfigError(f"no model named '{name}' in this run; there are {', '.join(names)}.{nearest(name, names)}")


# ------------------------------------------------------------------------------------------------ samples from a stream


@dataclass(frozen=True, slots=True)
class Group:
    """A rule for which of n samples count: the first ``finish_after`` that meet it.

    First is meant in tokens, not in time; ties go to the lower index. ``on``: "eos" (the reply ended by itself), or a
    string such as ``</think>``. A sample meets the rule when that string is written, and then continues to its end.
    ``accept``: a reply that does not pass does not count.
    """

    finish_after: int
    on: str = "eos"
    accept: Callable[[str], bool] | None = None

    def met(self, draft: Draft) -> bool:
        """Whether ``draft`` meets the rule now."""
        ended = draft.finish == "stop"
        return (ended or self.on != "eos" and self.on in draft.text) and (
            self.accept is None or self.accept(draft.text)
        )

    def limit(self, drafts: Sequence[Draft]) -> tuple[int, int] | None:
        """(tokens, index) of the last sample that counts; None while there are too few."""
        met = sorted((d.met, d.index) for d in drafts if d.met is not None)
        return met[self.finish_after - 1] if len(met) >= self.finish_after else None

    def beaten(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Running samples that can no longer be among the first.

        This depends on tokens only, so timing changes nothing but the number of wasted tokens.
        """
        limit = self.limit(drafts)
        if limit is None:
            return []
        return [
            d
            for d in drafts
            if d.finish is None and ((d.met, d.index) > limit if d.met is not None else (d.tokens + 1, d.index) > limit)
        ]


@dataclass(slots=True)
class Draft:
    """A sample in progress."""

    index: int
    text: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    met: int | None = None
    dropped: bool = False
    whole: Sample | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.tokens += chunk.count
        self.ids += chunk.ids
        self.confidences += chunk.confidences
        self.logprobs += chunk.logprobs
        if chunk.finish is not None:
            self.finish = "group" if self.dropped else chunk.finish
        self.whole = chunk.whole or self.whole

    def sample(self, endpoint: Endpoint) -> Sample:
        if self.whole is not None:
            return dataclasses.replace(self.whole, index=self.index, finish=self.finish, met=self.met)
        mean, lowest = summed_up(self.confidences, endpoint.window)
        total = sum(self.logprobs) if self.logprobs else None
        return Sample(
            self.index,
            self.text,
            self.tokens,
            self.finish or "cancelled",
            endpoint.name,
            endpoint.vocabulary,
            tuple(self.ids),
            mean,
            total,
            self.met,
            lowest,
        )


async def collect(draw: Draw, drafts: Sequence[Draft], group: Group | None) -> None:
    """Fill ``drafts``, one for each sample of ``draw``, until all have ended or are beaten."""
    async for chunk in draw:
        draft = drafts[chunk.index]
        if draft.finish is not None:
            continue
        draft.add(chunk)
        if group is None:
            continue
        if draft.met is None and not draft.dropped and group.met(draft):
            draft.met = draft.tokens
        losers = [d for d in group.beaten(drafts) if not d.dropped]
        for loser in losers:
            loser.dropped = True
        if losers:
            await draw.cancel([d.index for d in losers])
    if group is not None:  # a sample that ended before it could be stopped is beaten all the same
        limit = group.limit(drafts)
        for draft in drafts:
            if limit is not None and (draft.met is None or (draft.met, draft.index) > limit):
                draft.finish, draft.met = "group", None


def confidence_of(top: Sequence[float]) -> float:
    """Confidence of one token, from the log-probabilities of the k likeliest tokens.

    With k = 1 it would be large where the model is unsure.
    """
    return -sum(top) / len(top)


def plain(sample: Sample) -> dict[str, Any]:
    """A sample as JSON."""
    return {name: getattr(sample, name) for name in FIELDS}


def from_plain(entry: Mapping[str, Any]) -> Sample:
    return Sample(**{**entry, "ids": tuple(entry["ids"])})
