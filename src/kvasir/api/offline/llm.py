"""The Python API, shaped like vLLM's: ``LLM(path, **config).generate(prompts, params)``. The engine runs in this
process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvasir.api.calls import reasoning
from kvasir.api.offline import offline_pooling as offline
from kvasir.api.offline.lora import LoRARequest, load_once
from kvasir.api.offline.offline_pooling import EmbeddingOutput, PoolingCollector, PoolingRequestOutput, ScoringOutput
from kvasir.api.offline.outputs import Collector, RequestOutput
from kvasir.api.offline.vllm_args import settled
from kvasir.api.text.chat import check_messages
from kvasir.api.text.processing import Processing
from kvasir.client.admission import admit, admit_pooling
from kvasir.cluster.core import of_replicas
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError, RequestError, nearest
from kvasir.models import checkpoint
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import Event, PoolingParams, ProcessorParams, Request, SamplingParams

Prompt = str | dict[str, Any]
# A process with more frozen objects has frozen them itself: Python 3.12 freezes some hundred at its start, an engine
# process many times this number.
PYTHONS_OWN = 10_000


class LLM:
    """An engine in this process. Keywords are the settings of ``kvasir.config`` (``LLM("path", max_model_len=4096)``).

    ``model``: a folder or a hub id; default: the model that ships in the package. ``replicas``: with 2 or more, engines
    in processes of their own, each with a GPU or a share of the cores. Raises ConfigError when it cannot start. Close
    it, or use it as a context manager, to release its memory. Threads may share it: their calls take turns.
    """

    def __init__(
        self, model: str = "", *, config: EngineConfig | None = None, replicas: int = 1, **options: Any
    ) -> None:
        self.config = (config or EngineConfig()).replace(**({"model": model} if model else {}), **settled(options))
        # ClusterCore has what is used of an engine here.
        self._engine: Engine | None = Engine(self.config) if replicas == 1 else of_replicas(self.config, replicas)
        self._lock = threading.Lock()  # its holder steps the engine
        # Nobody reads tokens before a result is whole, except in streams.
        self.engine.scheduler.prompts_first = True
        self.info = self.engine.info
        self.tokenizer: Tokenizer | None = None
        if not self.config.model.skip_tokenizer_init:
            source = self.config.model
            path = checkpoint.resolve(
                source.tokenizer or source.model, source.revision if not source.tokenizer else None
            )
            self.tokenizer = Tokenizer.load(path, source.chat_template)
        self._ids = itertools.count()
        self._collectors: dict[str, Any] = {}  # by request id, for the open calls and streams
        self._streams: set[str] = set()  # ids of the requests that are streamed
        self._left: deque[str] = deque()  # ids of requests whose caller has left, to be cancelled

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
        """Release all memory, also on the device. Open streams lose their rest;
        later uses of the engine raise ConfigError."""
        import torch

        with self._turn():
            if self._engine is None:
                return
            self._engine.close()
            self._engine = None
        gc.collect()  # the engine's parts refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next engine asks the device how much memory is free

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError when none was loaded."""
        return self._need_tokenizer()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of the checkpoint's generation_config, with ``changes``."""
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: a string, ``{"prompt_token_ids": [...]}``, or ``{"prompt": "...", "parse_special":
        False, "add_special_tokens": False}`` with one of the last two or both. Results come in the order of the
        prompts.

        ``use_tqdm`` shows a progress bar. ``on_done`` gets the place and the result of each request when it ends,
        between two steps of the others; it may not use this LLM. ``lora_request``: the adapter that computes all
        prompts, or one for each (None: the base model). A request that cannot be served raises RequestError
        before any work is done; one that fails later has ``error`` set in its result and does not affect the others.
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
        if lora_request is not None and not isinstance(lora_request, (LoRARequest, list, tuple)):
            raise RequestError(
                f"expected LoRARequest(...) or a list of them, got {type(lora_request).__name__}", param="lora_request"
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
            adapters = [lora_request] * len(many) if isinstance(lora_request, LoRARequest) else lora_request
            adapters = [None] * len(many) if adapters is None else list(adapters)
            if len(adapters) != len(many):
                raise ValueError(f"{len(many)} prompts, but {len(adapters)} adapters")
            requests = [self._request(p, q, a) for p, q, a in zip(many, params, adapters)]
            texts = [p if isinstance(p, str) else p.get("prompt") for p in many]
            collectors = [Collector(r, text, self.tokenizer) for r, text in zip(requests, texts)]
            return self._run(requests, collectors, use_tqdm, on_done)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of such lists), through the chat template.

        ``continue_final_message``: the answer continues the last message, which the prompt then ends with. Variables of
        the template (``enable_thinking=False``) are further keywords. vLLM's ``chat_template_kwargs`` may
        also hold variables that the template does not read.
        """
        if not isinstance(messages, (list, tuple)):
            raise RequestError(
                f"messages: expected a list of messages, or a list of such lists, got {type(messages).__name__}",
                param="messages",
            )
        tokenizer = self._need_tokenizer()
        reads = frozenset().union(*(t.reads for t in tokenizer.templates.values()))
        given = {name for name, value in template_options.items() if value is not None}
        # A keyword that the template does not read (a misplaced sampling parameter, say) would have no effect.
        if "chat_template" not in given and (unread := given - reads):
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
                check_messages(list(m)),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_options,
            )
            for m in many
        ]
        prompts = [{"prompt_token_ids": i} for i in ids]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embed every prompt with an embedding model; ``.outputs.embedding`` is the vector, as in vLLM.

        ``prompt_name``: the prompt of the checkpoint's folder to put before texts. ``truncate_prompt_tokens``: keep at
        most so many tokens of each. Raises RequestError.
        """
        return offline.embed(self, prompts, pooling_params, use_tqdm, prompt_name, truncate_prompt_tokens)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = False,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score how well each text of ``data_2`` answers the one of ``data_1``, or that at the same place.

        A reranker reads both as one prompt, with ``instruction`` in it; an embedding model gives the cosine of their
        embeddings. ``.outputs.score`` is the score, as in vLLM. Raises RequestError.
        """
        return offline.score(self, data_1, data_2, pooling_params, use_tqdm, instruction, truncate_prompt_tokens)

    def pool(self, prompts: list[list[int]], params: PoolingParams, use_tqdm: bool = False) -> list[PoolingCollector]:
        """Compute the vectors of prompts given as token ids, and return their collectors. Raises RequestError."""
        with self._turn(), _short_collections():
            requests = [
                admit_pooling(ids, params, self.info, id=f"llm-{next(self._ids)}", arrival=time.monotonic())
                for ids in prompts
            ]
            collectors = [PoolingCollector(request) for request in requests]
            self._run(requests, collectors, use_tqdm)
        return collectors

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Complete one prompt and yield the text of branch 0 as it comes.
        Leaving the loop early cancels the request."""
        params = sampling_params or self.default_sampling_params()
        with self._turn():
            request, shown = self._request(prompt, params, lora_request), 0
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
                    if not output.finished:  # it may have ended during the yield, when other callers step
                        self._deliver(self.engine.step())

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raise RequestError when ``generate`` would refuse this request."""
        self._request(prompt, sampling_params)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "this needs the tokenizer; drop skip_tokenizer_init, or pass {'prompt_token_ids': [...]} and "
                "detokenize=False"
            )
        return self.tokenizer

    def _request(self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None = None) -> Request:
        if isinstance(prompt, str):
            ids = self._need_tokenizer().prompt_ids(prompt)
        elif isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
        elif isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
            ids = self._need_tokenizer().prompt_ids(prompt["prompt"], *offline.reading(prompt))
        else:
            raise RequestError(
                'a prompt is a string, {"prompt": "..."} or {"prompt_token_ids": [...]}', param="prompts"
            )
        encode = (lambda word: self.tokenizer.prompt_ids(word, add_special=False)) if self.tokenizer else None
        adapter = None if lora is None else load_once(self.engine, lora)
        name, now = f"llm-{next(self._ids)}", time.monotonic()
        params = offline.without_annotations(params)
        return admit(
            ids, params, self.info, id=name, arrival=now, encode=encode, adapter=adapter, processing=self._processing
        )

    def _processing(self, params: SamplingParams, ids: list[int]) -> list[ProcessorParams]:
        """The logit processors of a request. The format of the model's thinking is found in its chat template."""
        thinking = reasoning.choose("auto", self.tokenizer) if self.tokenizer else None
        return Processing(self.tokenizer, thinking)(params, ids)

    def _run(
        self,
        requests: list[Request],
        collecting: Sequence[Any],
        progress: bool,
        on_done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run the requests and return the outputs of their collectors, in order."""
        collectors = {collector.output.request_id: collector for collector in collecting}
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
        """Hold the engine for the caller inside the block."""
        try:
            with self._lock:
                yield
        finally:
            self._tidy()

    @contextlib.contextmanager
    def _collecting(self, collectors: dict[str, Any]) -> Iterator[None]:
        """Register collectors inside the block: every caller that steps the engine delivers their events. At the end,
        unfinished requests are cancelled."""
        self._collectors |= collectors
        try:
            yield
        finally:
            self._left.extend(collectors)
            self._tidy()

    def _tidy(self) -> None:
        """Cancel requests whose caller has left, without waiting. The garbage collector may drop a stream in the middle
        of a step, or on a thread that the step waits for; then the caller that holds the engine cancels it after the
        step."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._cancel_left()
            finally:
                self._lock.release()

    def _cancel_left(self) -> None:
        """Cancel requests whose caller has left; the caller of this holds the engine."""
        while self._left:
            request_id = self._left.popleft()
            del self._collectors[request_id]
            self._streams.discard(request_id)
            if self._engine is not None:
                self._engine.cancel(request_id)
                self._engine.scheduler.prompts_first = not self._streams

    def _deliver(self, events: list[Event]) -> list[Any]:
        """Give events to their collectors; return the collectors whose requests have ended with these events."""
        ended = []
        for event in events:
            collector = self._collectors.get(event.request_id)
            if collector is None:
                continue  # the caller has left
            for branch in collector.add(event):
                self.engine.cancel(event.request_id, branch)
            if collector.newly_done():
                ended.append(collector)
        return ended


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Restrict garbage collections inside the block to objects made since its start. With torch and a model a full
    collection takes as long as a dozen steps, and nothing is launched meanwhile. If the process has frozen its objects
    itself, nothing changes."""
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
    """Delay Ctrl-C to the end of the block, or to a call of the yielded function between two steps, because a step
    cannot be undone halfway. A second Ctrl-C does not wait. Signals reach the main thread only, so other threads need
    none of this."""
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


class _progress:
    """A rich progress bar over requests with tokens per second, or nothing."""

    def __init__(self, shown: bool, total: int) -> None:
        self.bar = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            # On stderr, because results may go to stdout.
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task("requests", total=total)
        self.tokens, self.since = 0, time.perf_counter()

    def __enter__(self):
        if self.bar is not None:
            self.bar.start()
        return self.advance

    def advance(self, collector: Any) -> None:
        self.tokens += collector.num_tokens
        if self.bar is not None:
            self.bar.update(
                self.task, advance=1, description=f"{self.tokens / (time.perf_counter() - self.since):,.0f} tok/s"
            )

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
