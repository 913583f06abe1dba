"""Learning while serving: traces go to a trainer's process, and its candidates come back between two steps.

The walk keeps every token, so weights may change under running requests; they change only how many tokens a step gives.
A candidate passes two gates. The trainer holds it back unless it gives more tokens a forward on traces that it has not
learned from. Here its time is compared with that of the version before (``swap_gate.py``); if a token takes longer, the
version before comes back. Whatever fails (trainer, ring, file, numbers) ends learning at worst, never a request.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvasir import technique
from kvasir.config import EngineConfig
from kvasir.engine.drafts.drafting import Drafting
from kvasir.engine.drafts.swap_gate import SwapGate
from kvasir.engine.drafts.tracing import Tracer
from kvasir.engine.part import LiveRequests, Part
from kvasir.engine.ways.runner import Runner
from kvasir.errors import ConfigError
from kvasir.learn import messages, options
from kvasir.learn.link import Trainer, private_folder
from kvasir.learn.options import LearnOptions
from kvasir.learn.ring import TraceRing
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.records import check_folder
from kvasir.speculation.drafter import DRAFTERS, Drafter
from kvasir.speculation.heads import NEW, facts_of
from kvasir.speculation.router import load_drafter
from kvasir.speculation.tenants import Tenants
from kvasir.speculation.versions import Versions
from kvasir.types import EngineStats, FinishReason, LearnStats, Plan, Sequence, Span, SpanResult

# Bytes of the ring of traces.
RING_BYTES = 256 << 20
# Versions in a row that were refused or rolled back, after which learning ends.
MAX_ROLLBACKS = 10
# Steps between two looks at whether drafts pay and acceptance falls.
LOOK = 64
# Weights of the recent and of the long mean of accepted tokens a draft at each look, and the ratio below which
# acceptance falls.
RECENT, LONG, FALLEN = 0.3, 0.02, 0.9


def drafter_for(config: EngineConfig) -> Drafter | None:
    """The drafter of the settings: with ``--learn`` for some tenants in two versions. Raises ConfigError where it
    cannot learn."""
    speculation = config.speculation
    wanted = options.read(speculation)
    drafter = load_drafter(speculation.drafter) if speculation.drafter else None
    if wanted is None or drafter is None:
        return drafter
    if len(drafter.parts) > 1 or not drafter.learns:
        able = technique.of_all(DRAFTERS, lambda name: technique.find(DRAFTERS, name, Drafter)[0])
        names = " or ".join(cls.name for cls in able if cls.learns)
        raise ConfigError(
            f"learn=on trains one drafter that reads hidden states, and not {drafter.name}. Use --drafter {names}, "
            "alone, or leave --learn out."
        )
    if options.ALL in speculation.learn_tenants:
        return drafter
    return Tenants(drafter, load_drafter(speculation.drafter), options.agreed(speculation.learn_tenants))


def device_bytes(config: EngineConfig, drafter: Drafter | None) -> Callable[[Any], int]:
    """Bytes of the device for a drafter, given the model: with ``--learn`` also for the versions of its weights."""
    if drafter is None:
        return lambda model: 0
    times = 1 if config.speculation.learn == "off" else 3
    return lambda model: times * drafter.device_bytes(model)


def start_learning(config: EngineConfig, drafting: Drafting | None, runner: Runner) -> Learning | None:
    """Start learning, if the settings say so. Raises ConfigError."""
    wanted = options.read(config.speculation)
    return None if wanted is None or drafting is None else Learning(config, wanted, drafting, runner)


class Learning(Part):
    """The part of the step loop that learns. ``command``: starts the trainer; default: kvasir's own."""

    def __init__(
        self,
        config: EngineConfig,
        wanted: LearnOptions,
        drafting: Drafting,
        runner: Runner,
        command: list[str] | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self._config, self._wanted, self._drafting, self._runner = config, wanted, drafting, runner
        self._out = config.speculation.learn_out and Path(config.speculation.learn_out).expanduser()
        if self._out:
            check_folder(self._out.parent, "--learn-out")
        drafter = self._drafter = drafting.drafter
        place, spec = runner.model.place, runner.model.spec
        layers = tuple(sorted({*drafter.hidden_layers, len(spec.layers) - 1}))
        self._model = str(checkpoint.resolve(config.model.model, config.model.revision))
        self._listener = runner.listen(layers)
        self._device = device_of(wanted.device, runner.device)
        self._base_version = 0
        self._versions = Versions(drafter.weights(), drafter.version)
        self._gate: SwapGate | None = None
        self.gate_rows: dict[str, int] = {}  # settings of the gate other than its own, for tests
        self._next: messages.Candidate | None = None  # came while another one was on trial
        self._staging: tuple[messages.Candidate, Future] | None = None
        self._threads = ThreadPoolExecutor(1, "kvasir-staging")
        self._folder = private_folder()
        self._stats = LearnStats()
        self._rows: list[int] = []  # tokens of the span that is being committed, its draft included
        self._rollbacks = 0  # in a row
        self._steps = 0
        self._seen = (0, 0, 0)  # drafts, accepted tokens and verified rows at the last look
        self._counted = (0, 0, 0)  # tokens, forwards and verified rows at the last step
        self._means: list[float] = []  # accepted tokens a draft: recent, long
        self._resting: bool | None = None
        self._start = ""  # the folder that the trainer starts from; "": random weights
        self._gaining = is_new(drafter)  # whether the trainer's candidates gain
        if not self._gaining:
            self._export(self._folder / "start", self._versions.kept)
            self._start = str(self._folder / "start")
        self._ring = TraceRing.create(self._folder, ring_bytes)
        agrees = options.agreed(config.speculation.learn_tenants)
        self.tracer = Tracer(
            self._ring,
            layers,
            spec.hidden_size,
            place.dtype,
            runner.device,
            lambda seq: agrees(seq) and options.may_learn(seq.request),
            lambda: (self._base_version, self._versions.serving),
        )
        self._trainer = Trainer(self._folder, self._order, command)
        if options.ALL in config.speculation.learn_tenants:
            log.warning("the drafter learns from all: how quickly a text comes may tell one tenant what others wrote")
        log.info("the drafter %s learns from what is served; its trainer runs on %s", drafter.name, self._device)

    def _order(self) -> messages.Order:
        model, wanted = self._runner.model, self._wanted
        return messages.Order(
            model=self._model,
            kind=self._drafter.name,
            drafter=self._start,
            layers=list(self._listener.layers),
            target=facts_of(model),
            device=self._device,
            dtype=str(model.place.dtype).removeprefix("torch."),
            share=wanted.share,
            every=wanted.every,
            lam=wanted.lam,
            version=self._stats.candidates + self._versions.accepted + 1,
            base_version=self._base_version,
            log_level=logging.getLevelName(log.getEffectiveLevel()),
        )

    def _export(self, folder: Path, weights: Any) -> None:
        """Write weights as a folder that ``--drafter NAME:model=`` takes, whole or not at all."""
        part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
        try:
            shutil.rmtree(part, ignore_errors=True)
            self._drafter.export(weights, part)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------- the steps

    @property
    def on(self) -> bool:
        """Whether spans are recorded."""
        return self._listener.on

    def tick(self) -> None:
        """Do what has come up, between two steps or while idle. Takes no time to speak of where nothing has."""
        for message in self._trainer.poll():
            if isinstance(message, messages.Candidate):
                self._stats.candidates += 1
                self._forget(self._next)
                self._next = message
            elif isinstance(message, messages.Report):
                self._stats.kl_by_depth, self._stats.busy_share = message.kl_by_depth, message.busy_share
                self._stats.slice_rows, self._stats.slice_ms = message.slice_rows, message.slice_ms
                self._stats.learned_tokens, self._stats.steps = message.traced, message.steps
                self._gaining = message.gaining
        if self._trainer.ended and not self._stats.ended:
            self._end(self._trainer.ended)
        if self._staging is not None and self._staging[1].done():
            self._staged()
        free = self._gate is None or self._gate.undecided and not self._drafting.controller.pays
        if self._next is not None and self._staging is None and free and not self._stats.ended:
            self._stage(self._next)
        self._listener.on = not (self.tracer.failed or self._stats.ended)

    def _stage(self, candidate: messages.Candidate) -> None:
        """Let a thread read and check a candidate. One on trial, of which nothing is known, gives way."""
        self._next = None
        if self._gate is not None:
            self._gate = None
            self._versions.refuse()
        self._staging = candidate, self._threads.submit(self._check, candidate)

    def _check(self, candidate: messages.Candidate) -> None:
        """Check a candidate whole and bring it to the device. Runs in a thread. Raises ValueError."""
        folder = Path(candidate.folder)
        try:
            card = msgspec.json.decode((folder / messages.CARD).read_bytes(), type=messages.Card)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"{messages.CARD} cannot be read: {error}") from error
        target = facts_of(self._runner.model)
        for name, found, own in (
            ("drafter", card.kind, self._drafter.name),
            ("number", card.version, candidate.version),
            ("layers", tuple(card.layers), tuple(self._drafter.hidden_layers)),
            ("target", card.target, {**card.target, **target}),
        ):
            if found != own:
                raise ValueError(f"its {name} {found} is not the served one's, {own}")
        self._versions.stage(folder / messages.WEIGHTS, candidate.version)

    def _staged(self) -> None:
        """Begin the trial of a candidate that was staged, or tell the trainer why it cannot be served."""
        candidate, future = self._staging
        self._staging = None
        self._forget(candidate)
        error = future.exception()
        if error is not None:
            self._versions.candidate = None
            self._refuse(candidate.version, str(error))
            return
        self._gate = SwapGate(**self.gate_rows)
        self._serve(True)

    def _forget(self, candidate: messages.Candidate | None) -> None:
        if candidate is not None:
            shutil.rmtree(candidate.folder, ignore_errors=True)

    def _serve(self, new: bool) -> None:
        before = self._versions.serving
        self._drafter.version = self._versions.serve(new)
        self._stats.swaps += self._versions.serving != before

    def before_plan(self, requests: LiveRequests) -> None:
        self.tick()

    def idle(self) -> None:
        self.tick()

    def committing(self, span: Span, result: SpanResult, tokens: list[int]) -> None:
        self._rows = span.tokens()  # the commit drops the draft

    def committed(self, span: Span, result: SpanResult, ends: bool) -> None:
        if self.on:
            self.heard(span, result, self._rows if result.path else span.tokens())

    def measured(self, plan: Plan, stats: EngineStats, now: float) -> None:
        self.stepped(plan, stats.step_seconds, stats.generation_tokens, stats.forwards)

    def heard(self, span: Span, result: SpanResult, tokens: list[int]) -> None:
        """Record a committed span, whose rows hold ``tokens``."""
        if result.hidden is not None and self._listener.on:
            heard = self._listener.of(result.hidden)
            self.tracer.record(span, result, tokens, heard)

    def stepped(self, plan: Plan, seconds: float, tokens: int, forwards: int) -> None:
        """Take note of a step that was read. ``tokens`` and ``forwards`` were counted since the start."""
        self.tracer.stepped()
        rows = self._drafting.controller.stats.drafted
        counted, self._counted = self._counted, (tokens, forwards, rows)
        self._steps += 1
        if self._steps % LOOK == 0:
            self._look(plan)
        if self._gate is None or not _decodes_alone(plan) or forwards == counted[1]:
            return
        pays = self._drafting.controller.pays
        verdict = self._gate.stepped(seconds, forwards - counted[1], tokens - counted[0], rows - counted[2], pays)
        if verdict is None:
            self._serve(self._gate.new)
        else:
            self._decide(verdict)

    def _look(self, plan: Plan) -> None:
        """Choose how much is traced, and whether the trainer may run."""
        controller = self._drafting.controller
        stats, seen = controller.stats, self._seen
        self._seen = stats.verified, stats.accepted, stats.drafted
        if stats.verified > seen[0]:
            mean = (stats.accepted - seen[1]) / (stats.verified - seen[0])
            self._means = [
                old + weight * (mean - old) for old, weight in zip(self._means or [mean, mean], (RECENT, LONG))
            ]
        fell = bool(self._means) and self._means[0] < FALLEN * self._means[1]
        self.tracer.all = self._gaining or not controller.pays or fell
        if self._device == "same":
            decodes = [span for span in plan.spans if span.length == 1 or span.commit == "walk"]
            context = sum(span.start for span in decodes)
            rest = bool(decodes) and not controller.could_pay(len(decodes), context)
            if rest or rest != self._resting:  # one that has just started has not heard it
                self._resting = rest
                self._trainer.send(messages.Rest(rest))

    def _decide(self, passes: bool) -> None:
        """Keep the candidate on trial, or go back to the version before."""
        why, self._gate = str(self._gate), None
        version = self._versions.candidate
        if not passes:
            self._versions.refuse()
            self._drafter.version = self._versions.serving
            self._stats.swaps += 1
            self._refuse(version, why)
            return
        self._versions.accept()
        self._drafter.version = self._versions.serving
        self._stats.accepted += 1
        self._rollbacks = 0
        log.info("version %d of the drafter is served: %s", version, why)
        self._trainer.send(messages.Accepted(version))
        self._threads.submit(self._keep, dict(self._versions.kept))

    def _keep(self, weights: Any) -> None:
        """Keep accepted weights for a trainer that starts again, and where ``--learn-out`` says so. Runs in a
        thread."""
        try:
            with torch.inference_mode():
                self._export(self._folder / "accepted", weights)
                self._start = str(self._folder / "accepted")
                if self._out:
                    self._export(self._out, weights)
        except OSError as error:  # an accepted version is served all the same; the next one is kept where there is room
            log.warning("the learned weights cannot be kept: %s", error)

    def _refuse(self, version: int, why: str) -> None:
        self._stats.rollbacks += 1
        self._rollbacks += 1
        log.warning("version %d of the drafter is not served: %s", version, why)
        self._trainer.send(messages.RolledBack(version, why))
        if self._rollbacks >= MAX_ROLLBACKS:
            self._end(f"{MAX_ROLLBACKS} versions in a row were refused, the last because {why}")

    def _end(self, reason: str) -> None:
        """Stop learning for good. The drafter goes on with the last accepted version."""
        self._stats.ended = reason
        log.error("no more learning: %s", reason)
        self._trainer.end(reason)
        if self._gate is not None:
            self._gate = None
            self._versions.refuse()
            self._drafter.version = self._versions.serving

    # -------------------------------------------------------------------------------------------------------- the rest

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        """Let the trace of a sequence that ends leave."""
        self.tracer.close(seq)

    def weights_changed(self, model: str | None = None) -> None:
        """Forget the traces: the served model has other weights, those of the checkpoint ``model`` if that is known.
        No request may be running."""
        self.tracer.forget()
        self._base_version += 1
        if model:
            self._model = str(checkpoint.resolve(model))
        target = facts_of(self._runner.model)
        self._trainer.send(messages.Renewed(self._base_version, self._model, target))

    def fill_stats(self, stats: EngineStats) -> None:
        s = self._stats
        s.version, s.traced, s.dropped = self._versions.serving, self.tracer.traced, self.tracer.dropped
        stats.learning = s

    def close(self) -> None:
        """End the trainer, wait until it is gone, and give the memory back."""
        self._threads.shutdown(cancel_futures=True)
        self._trainer.close()
        self.tracer.stop()
        self._ring.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


def is_new(drafter: Drafter) -> bool:
    """Whether the drafter begins with random weights."""
    return getattr(drafter.parts[-1].config, "model", "") == NEW


def device_of(wanted: str, engine: torch.device) -> str:
    """The trainer's device: cpu, cuda:N, or same. ``auto``: a second GPU; else the engine's; else the CPU. Raises
    ConfigError for a GPU that is not there."""
    count = torch.cuda.device_count() if engine.type == "cuda" else 0
    own = torch.cuda.current_device() if count and engine.index is None else engine.index
    if wanted == "auto":
        if engine.type != "cuda":
            return "cpu"
        return next((f"cuda:{i}" for i in range(count) if i != own), "same")
    if wanted == "cpu" or (wanted == "same" and engine.type == "cpu"):
        return "cpu"
    if wanted != "same" and int(wanted.removeprefix("cuda:")) >= count:
        raise ConfigError(f"learn:device={wanted}, but there are {count} GPUs for this engine. Use device=auto or cpu.")
    return "same" if wanted in ("same", f"cuda:{own}") else wanted


def _decodes_alone(plan: Plan) -> bool:
    """Whether a step held no prompt: all its rows draw or are guests."""
    return all(len(span.want.get("sample", ())) + len(span.guests) == span.length for span in plan.spans)
