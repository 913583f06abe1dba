"""The logit processors of a request, with their texts as token ids: what its parameters name, and the thinking budget.

Processors are found and checked here, so that a bad one is a 400 that names the parameter. Nothing of them is loaded
until a request asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvasir import technique
from kvasir.api.calls import reasoning
from kvasir.errors import ConfigError, RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import ProcessorParams, SamplingParams, Thinking

if TYPE_CHECKING:
    from kvasir.decoding.processor import Processor

# The processor that serves vLLM's thinking_token_budget: a limit alone, which ignores no end.
BUDGET = "budget:num_ignore=0,max_thinking="
# Kinds of grammars that have no room for a mark of thinking.
CLOSED = ("json_schema", "json_object", "choice", "regex")


class Processing:
    """Prepares the processors of requests for one model. ``parser``: the format of its thinking; None: it has none.
    ``allowed``: names that requests may give; None: all, files too."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        parser: type[reasoning.ReasoningParser] | None,
        allowed: Sequence[str] | None = None,
    ) -> None:
        """Raises ConfigError for an unknown name in ``allowed``."""
        self._tokenizer, self._parser, self._allowed = tokenizer, parser, None
        if allowed is not None:
            self._allowed = {_find(name) for name in allowed}

    def __call__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> list[ProcessorParams]:
        """Return the processors of one request, that of the budget first. Raises RequestError."""
        named = [("processors", spec) for spec in params.processors]
        if params.thinking_token_budget is not None:
            named.insert(0, ("thinking_token_budget", f"{BUDGET}{params.thinking_token_budget}"))
        thinking = self.thinking(prompt_ids) if named else None
        made, found = [], []
        for param, spec in named:
            processor, ready = self._prepare(param, spec, thinking)
            if processor.forces and any(p.forces for p in made):
                raise RequestError(
                    f"'{spec}' and another processor of this request both force tokens: send one of them",
                    param=param,
                    code="conflict",
                )
            grammar, inside = params.grammar, thinking is not None and thinking.prompt_ends == "inside"
            if processor.forces and inside and grammar is not None and not grammar.after and grammar.kind in CLOSED:
                raise RequestError(
                    f"the grammar ({grammar.kind}) holds from the first token, and the processor '{processor.name}' "
                    "forces the end of thinking, which it forbids: let the grammar start after the thinking, or switch "
                    "thinking off",
                    param=param,
                    code="conflict",
                )
            made.append(processor)
            found.append(ready)
        return found

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking | None:
        """The marks of thinking of the answer to this prompt; None: they are not known."""
        if self._tokenizer is None or self._parser is None:
            return None
        parser = reasoning.parser(self._parser, self._tokenizer, prompt_ids)
        assert parser is not None
        start, end = (
            tuple(self._tokenizer.encode(mark, add_special=False, parse_special=True))
            for mark in (parser.start, parser.end)
        )
        # An answer that continues a message starts in the thinking which that message left open.
        inside = parser.opened or _last(prompt_ids, start) > _last(prompt_ids, end)
        return Thinking(start, end, "after" if parser.disabled else "inside" if inside else "before", parser.end)

    def _prepare(self, param: str, spec: str, thinking: Thinking | None) -> tuple[Processor, ProcessorParams]:
        from kvasir.decoding.processor import PACKAGE, Processor

        name = spec.partition(":")[0].strip().replace("-", "_")
        if self._allowed is not None and param == "processors" and name not in self._allowed:
            names = ", ".join(sorted(self._allowed)) or "none"
            raise RequestError(
                f"the processor '{name[:80]}' is not allowed here; allowed are {names} (--processors of the server)",
                param=param,
                code="unsupported_parameter",
            )
        try:
            processor = technique.load(PACKAGE, spec, Processor)
            ids = processor.prepare(self._encode, thinking)
        except ConfigError as e:
            raise RequestError(str(e), param=param) from e
        return processor, ProcessorParams(spec, ids, thinking)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ConfigError("a processor's words need a tokenizer, and this engine runs without one; give ids=1|2|3")
        return self._tokenizer.encode(text, add_special=False)


def _find(name: str) -> str:
    """The name of an installed processor. Raises ConfigError."""
    from kvasir.decoding.processor import PACKAGE, Processor

    if technique.is_file(name):
        raise ConfigError(f"--processors {name}: a server allows installed processors, by name, and no files")
    return technique.find(PACKAGE, name, Processor)[0].name


def _last(ids: Sequence[int], mark: tuple[int, ...]) -> int:
    """The last place at which ``mark`` stands in ``ids``; -1: nowhere."""
    ends = (i for i in range(len(ids) - 1, -1, -1) if ids[i] == mark[-1]) if mark else ()
    return next((i for i in ends if tuple(ids[max(0, i + 1 - len(mark)) : i + 1]) == mark), -1)
