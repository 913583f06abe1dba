"""Test-time scaling for both kinds of routes: checks of a body's strategy, budget and problems, and running them.

A strategy arrives as a name and numbers, never as code. Every run has a budget; the server's ceiling stands in for
amounts that the client leaves out, and no request can ask for more. All calls carry the caller's tenant.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.api.http.service import Service
from kvasir.api.protocols.openai import ScalingBudget
from kvasir.api.text.chat import check_messages, texts
from kvasir.client.admission import stream_of
from kvasir.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from kvasir.scaling.ledger import Budget
    from kvasir.scaling.solve import Solution

# Most that one problem may spend.
CEILING = {"tokens": 1 << 20, "generated": 1 << 19, "calls": 4096}
# Largest number in a strategy's options (replies, loops, members).
MAX_NUMBER = 1024
# Most tokens of a reply, if the client sets no limit.
USUAL_TOKENS = 1024
# Problems of one run that are solved at the same time.
AT_ONCE = 16


@dataclasses.dataclass
class Plan:
    """A checked request; ``run`` it once."""

    service: Service
    strategy: Any
    problems: list[Any]
    sampling: Any
    seed: int
    tenant: str
    most: int  # most tokens of a reply; 0: no limit
    problem_budget: Budget
    budget: Budget | None

    async def run(self, on_event: Callable[[dict[str, Any]], None], journal: Path | None = None) -> Solution:
        """Run the plan. ``journal``: file that keeps its calls and from which a later run takes them.

        Raises RequestError when the engine is down or the strategy cannot run.
        """
        from kvasir.models.cost import active_params
        from kvasir.models.families import build_spec
        from kvasir.scaling.engine_endpoint import ClientEndpoint
        from kvasir.scaling.primitives import EndpointDown
        from kvasir.scaling.solve import solve

        info = self.service.info
        endpoint = ClientEndpoint(
            self.service.client,
            self.service.text.tokenizer,
            info.name,
            tenant=self.tenant,
            most=self.most,
            parameters=active_params(build_spec(info.config)) if info.config else 0,
            apart=self._apart,
        )
        try:
            return await solve(
                self.strategy,
                self.problems,
                [endpoint],
                seed=self.seed,
                sampling=self.sampling,
                budget=self.budget,
                problem_budget=self.problem_budget,
                on_event=on_event,
                at_once=AT_ONCE,
                journal=journal,
            )
        except EndpointDown as e:
            raise RequestError(f"the run ended: {e}", status=503, code="engine_down", retry_after=5.0) from e
        except ConfigError as e:
            raise RequestError(str(e), param="strategy", code="invalid_strategy") from e

    async def _apart(self, job: Callable[[], list[int]]) -> list[int]:
        """Run a job that renders the chat template in the threads for that, in turns by tenant."""
        renders_apart = self.service.text.tokenizer.renders_apart(None, False)
        return await self.service.preparing.when_free(self.tenant, renders_apart, job)


def plan(
    service: Service,
    spec: str,
    conversations: Sequence[tuple[str, list[dict[str, Any]]]],
    answer: str,
    tenant: str,
    *,
    seed: int | None,
    max_tokens: int | None,
    temperature: float | None,
    budget: ScalingBudget | None = None,
    problem_budget: ScalingBudget | None = None,
    where: str = "",
    most: int = 0,
) -> Plan:
    """Check everything before any work, off the event loop. Raises RequestError.

    ``conversations``: pairs of id and messages. ``where``: prefix of parameter names in errors. ``most``: most tokens
    of a reply, whatever the client or the strategy asks for; 0: no limit.
    """
    from kvasir.scaling.answers import ANSWERS
    from kvasir.scaling.endpoint import Sampling
    from kvasir.scaling.ledger import Budget
    from kvasir.scaling.problem import Problem

    strategy = _strategy(spec, service.info.name, where)
    places = ["messages" if where else f"problems[{i}].messages" for i in range(len(conversations))]
    checked = [check_messages(messages, place) for (_, messages), place in zip(conversations, places)]
    length, place = max((_length(service, messages, place), place) for messages, place in zip(checked, places))
    room = service.info.max_model_len - length
    if room < 1:
        raise RequestError(
            f"the prompt has {length} tokens; with a context of {service.info.max_model_len} nothing can follow",
            param=place,
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(
            f"max_tokens={max_tokens} is out of range: at least 1", param="max_tokens", code="invalid_parameter"
        )
    if most and max_tokens is not None:
        max_tokens = min(max_tokens, most)
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"{length} prompt tokens and max_tokens={max_tokens} exceed the context of {service.info.max_model_len}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    stream_of(seed)  # refuses the seeds that plain requests refuse
    if temperature is not None and not 0 <= temperature <= 10:
        raise RequestError(
            f"temperature={temperature:g} is out of range: 0 to 10", param="temperature", code="invalid_parameter"
        )
    problems = [Problem(name, tuple(messages), ANSWERS[answer]) for (name, _), messages in zip(conversations, checked)]
    asked = problem_budget.model_dump(exclude_none=True) if problem_budget else {}
    for name, value in asked.items():
        if value > CEILING[name]:
            raise RequestError(
                f"{name}={value} is more than a problem may spend here ({CEILING[name]})",
                param=f"{where or 'problem_'}budget.{name}",
            )
    total = Budget(**budget.model_dump(exclude_none=True)) if budget and budget.model_dump(exclude_none=True) else None
    warm = 1.0 if temperature is None else temperature
    return Plan(
        service,
        strategy,
        problems,
        Sampling(min(max_tokens or min(room, USUAL_TOKENS), most or room), warm),
        secrets.randbits(63) if seed is None else seed,
        tenant,
        most,
        Budget(**{**CEILING, **asked}),
        total,
    )


def _strategy(spec: str, model: str, where: str) -> Any:
    from kvasir.scaling.engine_endpoint import ClientEndpoint
    from kvasir.scaling.problem import Prompts
    from kvasir.scaling.strategy import load_strategy
    from kvasir.technique import is_file

    param = f"{where}strategy"
    if is_file(spec):
        raise RequestError(
            "a strategy over HTTP is a name, never a file of code: install it where the server runs "
            "(docs/adding-a-technique.md)",
            param=param,
            code="invalid_strategy",
        )
    try:
        strategy = load_strategy(spec)
        config = dataclasses.asdict(strategy.config) if strategy.config is not None else {}
        for name, value in config.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > MAX_NUMBER:
                raise RequestError(f"{spec}: {name} may be at most {MAX_NUMBER}", param=param, code="invalid_strategy")
        # The check needs names and capabilities only, so no engine is asked.
        shape = ClientEndpoint(None, None, model)  # type: ignore[arg-type]
        strategy.check([shape], Prompts())
    except ConfigError as e:
        raise RequestError(str(e), param=param, code="invalid_strategy") from e
    return strategy


def _length(service: Service, messages: list[dict[str, Any]], place: str) -> int:
    """Length of the prompt in tokens.
    Raises RequestError that names ``place``, where the messages stand in the body."""
    try:
        check = partial(service.text.check_size, max_model_len=service.info.max_model_len)
        check(texts(messages))
        return len(service.text.tokenizer.encode_chat(messages, check=check))
    except RequestError as e:
        e.param = re.sub(r"^(prompt|messages)\b|^$", place, e.param or "")
        raise


def usage(amounts: dict[str, float]) -> dict[str, int]:
    """The usage under OpenAI's names. Every generated token counts, kept or not."""
    prompt, made = int(amounts["uncached"] + amounts["cached"]), int(amounts["generated"] + amounts["discarded"])
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def told(event: dict[str, Any]) -> dict[str, Any]:
    """An event for clients: its plain values, without lists of texts and objects."""
    return {name: value for name, value in event.items() if isinstance(value, (str, int, float, bool, type(None)))}


def summary(solved: Any) -> dict[str, Any]:
    """One problem's result for clients."""
    result, amounts = solved.result, solved.ledger.total()
    return {
        "id": solved.problem.id,
        "text": result.text,
        "answer": result.answer,
        "agreement": round(result.agreement, 4),
        "votes": result.votes,
        "finish_reason": result.sample.finish if result.sample else None,
        "why": result.why,
        "usage": usage(amounts),
        **_split(amounts),
    }


def _split(amounts: dict[str, float]) -> dict[str, Any]:
    return {
        "cost": {
            name: int(amounts[name]) for name in ("calls", "uncached", "cached", "generated", "discarded", "scored")
        }
    }
