"""The Python API, shaped like vLLM's: ``LLM(path, **config).generate(prompts, params)``. The engine runs in this process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.api.chat import check_messages
from kvasir.api.detokenize import Detokenizer
from kvasir.api.vllm_flags import settled
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError, RequestError, nearest
from kvasir.models import checkpoint
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import Event, PromptScore, Request, SamplingParams, TokenLogprob

Prompt = str | dict[str, Any]
PYTHONS_OWN = 10_000  # objects: 3.12 freezes some hundred of its own at its start; who freezes an engine's process has many times more


@dataclass(slots=True)
class Logprob:
    """Natural log-probability of one token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One branch. ``token_ids`` include the token that ended it; ``text`` does not. ``confidences``: of each token, where asked for;
    `kvasir.decoding.confidence.summed_up` makes the mean and the lowest window of them."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    confidences: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """``score``: of the prompt's tokens from ``score_from`` on. ``error``: why the request failed after it had begun (a grammar that
    cannot be compiled, a fault in its step); its unfinished branches then have ``finish_reason="error"``, and the other requests of the
    call are unharmed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    score: PromptScore | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: RequestError | None = None


class LLM:
    """An engine in this process. Keywords are the settings of ``kvasir.config`` (``LLM("path", max_model_len=4096)``).

    ``model``: a folder or a hub id; none means the model that ships in the package. Raises ConfigError when it cannot
    start. Close it, or use it as a context manager, to give its memory back. Threads may share it: their calls take turns.
    """

    def __init__(self, model: str = "", *, config: EngineConfig | None = None, **options: Any) -> None:
        self.config = (config or EngineConfig()).replace(**({"model": model} if model else {}), **settled(options))
        self._engine: Engine | None = Engine(self.config)
        self._lock = threading.Lock()  # whoever holds it steps the engine
        self.engine.scheduler.prompts_first = True  # results are whole ones, but for streams
        self.info = self.engine.info
        self.tokenizer: Tokenizer | None = None
        if not self.config.model.skip_tokenizer_init:
            source = self.config.model
            path = checkpoint.resolve(
                source.tokenizer or source.model, source.revision if not source.tokenizer else None
            )
            self.tokenizer = Tokenizer.load(path, source.chat_template)
        self._ids = itertools.count()
        self._collectors: dict[str, Collector] = {}  # of the calls and streams under way
        self._streams: set[str] = set()  # those of them that somebody reads along
        self._left: deque[str] = deque()  # those whose caller has left, to be cancelled

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("this LLM is closed; make another one")
        return self._engine

    def close(self) -> None:
        """Give memory back, on the device too. What streams still have to come is lost; what needs the engine later raises ConfigError."""
        import torch

        with self._turn():
            if self._engine is None:
                return
            self._engine.close()
            self._engine = None
        gc.collect()  # its parts know each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # who starts next asks the device what is free

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        return self._need_tokenizer()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the checkpoint's generation_config asks for, with ``changes``."""
        known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return SamplingParams(
            **{k: v for k, v in self.info.generation_defaults.items() if k in known and v is not None} | changes
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_done: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: a string, or ``{"prompt_token_ids": [...]}``. Results come in the order of the prompts.

        ``use_tqdm`` shows a progress bar. ``on_done`` gets each result and its place in that order as it ends, between two steps, while the
        others go on; it may not use this LLM. A request that cannot be served raises RequestError before any work is done; one that fails
        later has ``error`` set in its result, and harms no other.
        """
        try:
            many = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        except TypeError as e:
            raise RequestError(
                f"prompts: expected a prompt or a list of them, got {type(prompts).__name__}", param="prompts"
            ) from e
        if sampling_params is not None and not isinstance(sampling_params, (SamplingParams, list, tuple)):
            raise RequestError(
                f"expected SamplingParams(...) or a list of them, got {type(sampling_params).__name__}",
                param="sampling_params",
            )
        with self._turn(), _short_collections():
            params = [
                p or self.default_sampling_params()
                for p in (
                    [sampling_params] * len(many)
                    if sampling_params is None or isinstance(sampling_params, SamplingParams)
                    else sampling_params
                )
            ]
            if len(params) != len(many):
                raise ValueError(f"{len(many)} prompts, but {len(params)} sampling params")
            requests = [self._request(p, q) for p, q in zip(many, params)]
            return self._run(requests, [p if isinstance(p, str) else p.get("prompt") for p in many], use_tqdm, on_done)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of such lists), through the chat template. What the template reads
        (``enable_thinking=False``) is given as further keywords, or, where one that it does not read shall do no harm, as vLLM's
        ``chat_template_kwargs``."""
        if not isinstance(messages, (list, tuple)):
            raise RequestError(
                f"messages: expected a list of messages, or a list of such lists, got {type(messages).__name__}",
                param="messages",
            )
        tokenizer = self._need_tokenizer()
        reads = frozenset().union(*(t.reads for t in tokenizer.templates.values()))
        given = {name for name, value in template_options.items() if value is not None}
        if "chat_template" not in given and (
            unread := given - reads
        ):  # a sampling parameter, say, or a LoRA: nobody would miss it
            name = min(unread)
            raise RequestError(
                f"chat() takes no '{name}', and the chat template does not read it.{nearest(name, reads)}",
                param=name,
                code="unsupported_parameter",
            )
        template_options = {**(chat_template_kwargs or {}), **template_options}
        many = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        if not all(many):
            raise RequestError("a conversation has no messages", param="messages")
        ids = [
            tokenizer.encode_chat(
                check_messages(list(m)), tools=tools, add_generation_prompt=add_generation_prompt, **template_options
            )
            for m in many
        ]
        return self.generate([{"prompt_token_ids": i} for i in ids], sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and yield its text (branch 0) as it comes. Leaving the loop early cancels the request."""
        request, shown = self._request(prompt, sampling_params or self.default_sampling_params()), 0
        collector = Collector(request, None, self._need_tokenizer())
        with self._collecting({request.id: collector}):
            with self._turn(), _uninterrupted():
                self._streams.add(request.id)
                self.engine.scheduler.prompts_first = False
                self._deliver(self.engine.submit(request))
            while True:
                output, done = collector.output, collector.output.finished
                if output.error is not None:
                    raise output.error
                text = output.outputs[0].text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
                if done:
                    return
                with self._turn(), _uninterrupted():
                    if not output.finished:  # it may have ended at the yield, where others step
                        self._deliver(self.engine.step())

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raise RequestError when ``generate`` would refuse this request."""
        self._request(prompt, sampling_params)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "this needs the tokenizer; drop skip_tokenizer_init, or pass {'prompt_token_ids': [...]} and detokenize=False"
            )
        return self.tokenizer

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            ids = self._need_tokenizer().encode(prompt)
        elif isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
        elif isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
            ids = self._need_tokenizer().encode(prompt["prompt"])
        else:
            raise RequestError(
                'a prompt is a string, {"prompt": "..."} or {"prompt_token_ids": [...]}', param="prompts"
            )
        encode = (lambda text: self.tokenizer.encode(text, add_special=False)) if self.tokenizer else None
        return admit(ids, params, self.info, id=f"llm-{next(self._ids)}", arrival=time.monotonic(), encode=encode)

    def _run(
        self,
        requests: list[Request],
        texts: list[str | None],
        progress: bool,
        on_done: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        collectors = {r.id: Collector(r, text, self.tokenizer) for r, text in zip(requests, texts)}
        places = {r.id: place for place, r in enumerate(requests)}
        waiting = iter(requests)
        pending = next(waiting, None)
        num_open = len(requests)
        with self._collecting(collectors), _progress(progress, len(requests)) as advance, _uninterrupted() as interrupt:
            while num_open:
                events: list[Event] = []
                while pending is not None:  # feed the queue up to its bound, then step
                    accepted = self.engine.submit(pending)
                    if (
                        accepted
                        and accepted[0].kind == "error"
                        and accepted[0].status == 429
                        and self.engine.has_work()
                    ):
                        break
                    events += accepted
                    pending = next(waiting, None)
                ended = self._deliver(events + self.engine.step())
                self._cancel_left()
                for collector in ended:
                    if (place := places.get(collector.output.request_id)) is not None:
                        num_open -= 1
                        advance(collector)
                        if on_done is not None:
                            on_done(place, collector.output)
                interrupt()  # once this step's results are handed over
        return [collectors[r.id].output for r in requests]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """While this lasts, the engine is the caller's."""
        try:
            with self._lock:
                yield
        finally:
            self._tidy()

    @contextlib.contextmanager
    def _collecting(self, collectors: dict[str, Collector]) -> Iterator[None]:
        """While this lasts, whoever steps the engine hands these collectors what is theirs. Requests that are left are cancelled."""
        self._collectors |= collectors
        try:
            yield
        finally:
            self._left.extend(collectors)
            self._tidy()

    def _tidy(self) -> None:
        """Cancel what was left; never waits. A stream may be dropped by the garbage collector, in the middle of a step or on a thread that the
        step waits for: then whoever has the turn does it, after the step."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._cancel_left()
            finally:
                self._lock.release()

    def _cancel_left(self) -> None:
        """For who has the turn."""
        while self._left:
            request_id = self._left.popleft()
            del self._collectors[request_id]
            self._streams.discard(request_id)
            if self._engine is not None:
                self._engine.cancel(request_id)
                self._engine.scheduler.prompts_first = not self._streams

    def _deliver(self, events: list[Event]) -> list[Collector]:
        """Returns the collectors whose requests have ended with these events."""
        ended = []
        for event in events:
            collector = self._collectors.get(event.request_id)
            if collector is None:
                continue  # whoever wanted it has left
            for branch in collector.add(event):
                self.engine.cancel(event.request_id, branch)
            if collector.newly_done():
                ended.append(collector)
        return ended


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """While this lasts, a garbage collection walks what was made since. With torch and a model a full one takes as long as a dozen steps,
    and nothing is launched meanwhile. What was frozen already is somebody else's, and stays so."""
    if gc.get_freeze_count() > PYTHONS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits for the end, or for a call of what is yielded between two steps, since a step cannot be taken back halfway; pressed
    again, it does not wait. Signals reach the main thread only, so others have nothing to wait for."""
    usual = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(usual):
        yield lambda: None
        return
    pressed: list[tuple[Any, ...]] = []

    def press(*args: Any) -> None:
        if pressed:
            usual(*args)
        pressed.append(args)

    def interrupt() -> None:
        if pressed:
            usual(*pressed.pop())

    signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, usual)
    interrupt()


class Collector:
    """Builds one request's output from its events."""

    def __init__(self, request: Request, text: str | None, tokenizer: Tokenizer | None) -> None:
        n, params = request.params.n, request.params
        self.params = params
        self.tokenizer = tokenizer
        self.output = RequestOutput(request.id, text, request.prompt_ids, [CompletionOutput(i) for i in range(n)])
        self._texts = (
            [Detokenizer(tokenizer, request.prompt_ids, params) for _ in range(n)]
            if tokenizer and params.detokenize
            else []
        )

    def newly_done(self) -> bool:
        """True once, when the last branch has ended."""
        if self.output.finished:
            return False
        for out in self.output.outputs:
            if out.finish_reason is None:
                return False
        self.output.finished = True
        return True

    def add(self, event: Event) -> list[int]:
        """Take an event in; returns the branches that a stop string has just ended and the engine should cancel."""
        if event.kind == "error":
            self.output.error = RequestError(event.message, status=event.status, param=event.param, code=event.code)
            for out in self.output.outputs:
                out.finish_reason = out.finish_reason or "error"
        if event.kind != "tokens":
            return []
        out = self.output.outputs[event.branch]
        if out.finish_reason is not None:
            return []  # the engine's last word on a branch that a stop string ended here
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, event.num_cached)
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = [p and self._named(p) for p in event.prompt_logprobs]
        self.output.score = event.score or self.output.score
        tokens, stopped = event.token_ids, None
        if self._texts:
            delta = self._texts[event.branch].push(
                tokens, event.finish_reason is not None, event.finish_reason == "stop"
            )
            out.text += delta.text
            stopped = delta.stop
            if stopped is not None:
                tokens = tokens[: delta.num_tokens]
        out.token_ids += tokens
        if event.logprobs is not None:
            entries = event.logprobs[: len(tokens)]
            if self.params.confidence:
                out.confidences = out.confidences or []
                out.confidences += [p.confidence for p in entries]
            out.logprobs = out.logprobs or []
            out.logprobs += [self._named(p) for p in entries]
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(p.logprob for p in entries)
        out.finish_reason, out.stop_reason = (
            ("stop", stopped) if stopped is not None else (event.finish_reason, event.stop_reason)
        )
        return [event.branch] if stopped is not None and event.finish_reason is None else []

    def _named(self, entry: TokenLogprob) -> dict[int, Logprob]:
        def named(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, self.tokenizer.token_text(token) if self.tokenizer else None)

        table = {entry.id: named(entry.id, entry.logprob, entry.rank)}
        for place, (token, logprob) in enumerate(entry.top, start=1):
            table.setdefault(token, named(token, logprob, place))
        return table


class _progress:
    """A rich progress bar over requests with tokens per second, or nothing."""

    def __init__(self, shown: bool, total: int) -> None:
        self.bar = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # results may go to stdout meanwhile
            self.task = self.bar.add_task("requests", total=total)
        self.tokens, self.since = 0, time.perf_counter()

    def __enter__(self):
        if self.bar is not None:
            self.bar.start()
        return self.advance

    def advance(self, collector: Collector) -> None:
        self.tokens += sum(len(o.token_ids) for o in collector.output.outputs)
        if self.bar is not None:
            self.bar.update(
                self.task, advance=1, description=f"{self.tokens / (time.perf_counter() - self.since):,.0f} tok/s"
            )

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
