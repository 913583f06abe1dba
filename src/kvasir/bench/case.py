"""A case: a TOML file that says what is compared, on which workloads, how often, and which ratios are the target.

title = "..."                      what the table is about, for readers of the file
shape = "llama-8b"                 a known shape with random weights; or model = "..." (a folder or hub id)
repeats = 5                        rounds that count; with several arms, lives of each arm, in turns
rounds = 1                         rounds of each life, with several arms
cached = true                      time only decoding: a life computes its prompts once and then has them cached
on_disk = true                     write a shape's random weights for all engines; else each makes its own
settings = { max_num_seqs = 256 }  settings of each of our arms; with traces a server's, too
[arms.kvasir]                      one of our arms, with its own settings; targets refer to the first arm
shape = "llama-8b-mla"             optional, in an arm: its own shape, with the case's vocabulary
windows = 0                        optional, in an arm of traces: only its capacity is measured
[peer]
name = "vllm"
repeats = [3, 2]                   rounds before ours and after it
options = { ... }                  the peer's own settings
variants.vllm_fp8 = { ... }        optional: another arm of the peer, with these settings changed
[workloads.decode8]
batch = 8
prompt = 1024                      tokens of each prompt
output = 128                       tokens of each answer
warmup_prompt = 1024               optional: prompt tokens of the warm-up round, if fewer
text = "repeated"                  optional: prompts with structure, for drafts: repeated, tasks or edits
measure = ["prefill"]              optional: some of prefill, decode and total; only total makes a load
targets = { decode = 1.10 }        least ratio to the peer, for decode, prefill or total
[targets]                          or for any metric and any two arms: "METRIC ARM/ARM" = least ratio
[traces.half]                      or a request trace through servers; see ``load.Load`` for the keys
[agents.s64]                       or sessions of agents through servers; see ``agents_load.AgentLoad`` for the keys

An empty or missing model means the one in the package. Prompts of tasks and edits come from the lab and have at most
``prompt`` tokens. A load (only total is measured) may have more sequences than run at once.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench.agents_load import AgentLoad
from kvasir.bench.load import Load
from kvasir.bench.workloads import Batch
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, from_lab, nearest
from kvasir.plain_files import refuse_special
from kvasir.technique import module

KINDS = ("prefill", "decode", "total")
# Package of the kinds of prompts that come from elsewhere, and those for which kvasir-lab has problems.
PROMPTS, PROBLEMS = "kvasir.bench.prompts", ("tasks", "edits")
TEXTS = ("random", "repeated", "tasks", "edits")


@dataclass(frozen=True, slots=True)
class Workload:
    batch: Batch
    warmup: Batch
    targets: dict[str, float]  # kind -> least ratio to the peer
    kinds: tuple[str, ...] = KINDS  # measured rates
    text: str = "random"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    options: dict[str, Any]
    repeats: tuple[int, int]  # rounds before and after ours
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> changed options

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        """The peer and its variants, with all their options."""
        return {
            self.name: self.options,
            **{name: {**self.options, **changes} for name, changes in self.variants.items()},
        }


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: str | None
    model: str
    repeats: int
    arms: dict[str, dict[str, Any]]  # name -> settings, the shared ones included
    workloads: tuple[Workload, ...] = ()
    traces: dict[str, Load] = field(default_factory=dict)
    peer: Peer | None = None
    rounds: int = 1
    cached: bool = False
    on_disk: bool = False
    shapes: dict[str, str] = field(default_factory=dict)  # of arms that have their own
    windows: dict[str, int] = field(default_factory=dict)  # of arms that do not have as many as the case repeats
    targets: dict[str, float] = field(default_factory=dict)  # "METRIC ARM/ARM" -> least ratio
    agents: dict[str, AgentLoad] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether the case goes through servers."""
        return bool(self.traces or self.agents)

    @property
    def first(self) -> str:
        return next(iter(self.arms))


def read(path: Path) -> Case:
    """Read a case. Raises ConfigError with the file, the key and what is wrong."""
    refuse_special(path)
    try:
        table = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the case {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    try:
        return parse(path.stem, table)
    except ConfigError as e:
        raise ConfigError(f"{path.name}: {e}") from e


def parse(name: str, table: dict[str, Any]) -> Case:
    _known(
        table,
        (
            "title",
            "shape",
            "model",
            "repeats",
            "settings",
            "arms",
            "peer",
            "workloads",
            "traces",
            "agents",
            "rounds",
            "cached",
            "on_disk",
            "targets",
        ),
        "the case",
    )
    shape, model = table.get("shape"), table.get("model", "")
    if shape and model:
        raise ConfigError("a case has a shape or a model, not both")
    for key in ("repeats", "rounds"):
        if not isinstance(value := table.get(key, 5), int) or value < 1:
            raise ConfigError(f"{key}={value!r}: expected a whole number of at least 1")
    arms = {arm: {**table.get("settings", {}), **changes} for arm, changes in table.get("arms", {"kvasir": {}}).items()}
    shapes = {arm: settings.pop("shape") for arm, settings in arms.items() if "shape" in settings}
    windows = {arm: settings.pop("windows") for arm, settings in arms.items() if "windows" in settings}
    if windows and ("traces" not in table or set(windows.values()) != {0} or next(iter(arms)) in windows):
        raise ConfigError("windows = 0 stands in arms of traces, except the first: only their capacity is measured")
    if shapes and (not shape or table.get("on_disk") or "peer" in table):
        raise ConfigError("arms have shapes of their own only beside a shape that is not on disk, without a peer")
    for arm, settings in arms.items():
        try:
            (Settings if "traces" in table or "agents" in table else EngineConfig).of(**settings)
        except ConfigError as e:
            raise ConfigError(f"arm {arm}: {e}") from e
    workloads = tuple(_workload(n, t) for n, t in table.get("workloads", {}).items())
    traces = {n: Load.of(n, t) for n, t in table.get("traces", {}).items()}
    agents = {n: AgentLoad.of(n, t) for n, t in table.get("agents", {}).items()}
    if sum(map(bool, (workloads, traces, agents))) != 1:
        raise ConfigError("a case has [workloads.NAME], [traces.NAME] or [agents.NAME], one of the three")
    peer = _peer(table["peer"]) if "peer" in table else None
    others = list(peer.arms) if peer else []
    if taken := [n for n in others if n in arms]:
        raise ConfigError(f"an arm is named like the peer: {taken[0]}")
    cached, targets = table.get("cached", False), table.get("targets", {})
    if (traces or agents) and (cached or targets or "rounds" in table or peer and peer.variants):
        raise ConfigError(
            "traces and agents go through servers: such a case has no cached prompts, no rounds, no [targets] and no "
            "variants of the peer"
        )
    if agents and shapes:
        raise ConfigError("all arms of a case of agents serve one shape")
    if cached and (odd := [w.batch.name for w in workloads if w.kinds != ("decode",) and w.kinds != KINDS]):
        raise ConfigError(f"workload {odd[0]}: a case with cached prompts measures only decoding")
    if table.get("on_disk") and not shape:
        raise ConfigError("on_disk needs a shape, whose weights are random; a model has weights on disk")
    rates: list[str] = []
    for w in workloads:
        if w.text != "random" and (cached or peer and peer.name != "vllm" or w.text != "repeated" and shape):
            raise ConfigError(
                f"workload {w.batch.name}: text = {w.text!r} needs prompts that are not cached, no other peer than vllm"
                + (", and a model of the lab" if w.text != "repeated" else "")
            )
        measured = w.kinds if w.text == "random" and not cached else ("decode",)
        if odd := [kind for kind in w.targets if kind not in measured]:
            raise ConfigError(
                f"workload {w.batch.name}: a target names {odd[0]}, but only {' and '.join(measured)} is measured"
            )
        rates += [f"{w.batch.name}.{kind}_tok_s" for kind in measured]
    for metric in targets:
        if not set(metric.rpartition(" ")[2].split("/")) <= {*arms, *others} or metric.count("/") != 1:
            raise ConfigError(
                f"target {metric!r}: expected 'METRIC ARM/ARM' with arms of the case: {', '.join([*arms, *others])}"
            )
        # A target that is never judged would never be missed.
        if (rate := metric.rpartition(" ")[0]).endswith("_tok_s") and rate not in rates:
            raise ConfigError(f"target {metric!r}: '{rate}' is not measured.{nearest(rate, rates)}")
    return Case(
        name,
        shape,
        model,
        table.get("repeats", 5),
        arms,
        workloads,
        traces,
        peer,
        table.get("rounds", 1),
        cached,
        table.get("on_disk", False),
        shapes,
        windows,
        {metric: float(ratio) for metric, ratio in targets.items()},
        agents,
    )


def _workload(name: str, table: dict[str, Any]) -> Workload:
    _known(table, ("batch", "prompt", "output", "warmup_prompt", "measure", "text", "targets"), f"workload {name}")
    numbers = [table.get(key, 0) for key in ("batch", "prompt", "output")]
    batch = Batch.parse(":".join([name, *map(str, numbers)]))
    _known(table.get("targets", {}), KINDS, f"the targets of {name}")
    kinds = table.get("measure", KINDS)
    _known(dict.fromkeys(kinds), KINDS, f"what is measured of {name}")
    text = table.get("text", "random")
    if text not in TEXTS:
        raise ConfigError(f"workload {name}: text = {text!r} is none of {', '.join(TEXTS)}")
    if text in PROBLEMS and module(PROMPTS, "problems") is None:
        raise ConfigError(from_lab(f"workload {name}: text = {text!r}"))
    warmup = dataclasses.replace(batch, prompt=min(batch.prompt, table.get("warmup_prompt", batch.prompt)))
    return Workload(
        batch,
        warmup,
        {kind: float(ratio) for kind, ratio in table.get("targets", {}).items()},
        tuple(kinds) or KINDS,
        text,
    )


def _peer(table: dict[str, Any]) -> Peer:
    _known(table, ("name", "options", "repeats", "variants"), "the peer")
    before, after = table.get("repeats", [3, 2])
    return Peer(table.get("name", ""), table.get("options", {}), (before, after), table.get("variants", {}))


def _known(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where} has no key '{key}'.{nearest(key, keys)}")
