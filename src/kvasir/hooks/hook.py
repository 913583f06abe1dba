"""The seam of hooks: changes to hidden states that are data, not code.

A hook says where it acts (a site and layers), on which rows (a gate), and what it does (an operation with stored
tensors). Hooks that act together are a *set*, a folder that a request names. Every row of a step does the same
arithmetic, and a gate decides what changes, so that one captured step serves requests with different sets and with
none.

An operation is one module in `ops/`. It turns its tensors into a `Steer`, which ``kernels/steer.py`` applies.

Legend: H heads (1 at the sites of whole states), D width of a head (or of the state), C vectors, V vocabulary.
"""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvasir import technique
from kvasir.errors import ConfigError, nearest
from kvasir.plain_files import refuse_special
from kvasir.technique import Technique
from kvasir.types import HookInfo

if TYPE_CHECKING:
    import torch

OPS = "kvasir.hooks.ops"
CARD, WEIGHTS = "hooks.json", "hooks.safetensors"
# Between attention and o, by head; what o gives, before it joins the residual stream; the stream behind a layer.
SITES = ("head_out", "attn_out", "resid")
# Hooks of a set: the bits that a row's word has for gates (``kernels.steer.MAX_HOOKS``).
MAX_HOOKS = 8
LONGEST = (1 << 31) - 1  # end of a window that has none


@dataclass(frozen=True, slots=True)
class Steer:
    """The move of a hook at one site of one layer, as ``kernels.steer.Steers`` has it by slot. ``mode``: as there;
    ``vectors_CHD``, ``biases_CH`` fp32; ``heads_H``: whether each head moves (None: all)."""

    mode: int
    gain: float
    vectors_CHD: torch.Tensor
    biases_CH: torch.Tensor
    target: float = 0.0
    heads_H: torch.Tensor | None = None


class Op(Technique, abc.ABC):
    """One operation. ``records``: it copies states and changes none."""

    affects_kv = True
    records: ClassVar[bool] = False

    @abc.abstractmethod
    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer | None:
        """Return the move for one layer's ``tensors`` by name, at a site of ``heads`` heads of ``width`` elements;
        None: there is none. A request's strength multiplies its gain. Raises ConfigError for tensors that are missing
        or have other shapes."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which rows a hook acts on, by their input token and position alone, never by what kind of step computes them: an
    answer that was preempted is computed again as a prompt.

    ``tokens``: input tokens (None: all). ``window``: first position and end. ``answers``: rows from the prompt's last
    on. All must hold."""

    tokens: tuple[int, ...] | None = None
    window: tuple[int, int] = (0, LONGEST)
    answers: bool = False

    @classmethod
    def read(cls, given: Any) -> Gate:
        """The gate of a card: "all", "last_prompt_on", {"token_in": ids}, {"window": [first, end]}, or a list of these,
        which must all hold. Raises ConfigError."""
        gate = cls()
        for part in given if isinstance(given, list) else [given]:
            name, value = (part, None) if isinstance(part, str) else next(iter(dict(part).items()), ("", None))
            if name == "last_prompt_on":
                gate = cls(gate.tokens, gate.window, True)
            elif name == "token_in" and isinstance(value, list) and value and all(type(i) is int for i in value):
                kept = value if gate.tokens is None else sorted({*value} & {*gate.tokens})
                gate = cls(tuple(kept), gate.window, gate.answers)
            elif name == "window" and isinstance(value, list) and list(map(type, value)) == [int, int]:
                if not 0 <= value[0] < value[1] <= LONGEST:
                    raise ConfigError(f"window {str(value)[:80]}: expected 0 <= first position < end <= {LONGEST}")
                window = max(gate.window[0], value[0]), min(gate.window[1], value[1])
                gate = cls(gate.tokens, window, gate.answers)
            elif name != "all":
                raise ConfigError(
                    f"gate {part!r}: there are 'all', 'last_prompt_on', {{'token_in': [ids]}} and "
                    "{'window': [first position, end]}, or a list of these, which must all hold"
                )
        return gate

    def written(self) -> list[Any]:
        """The gate as ``read`` takes it."""
        found: list[Any] = ["last_prompt_on"] * self.answers
        found += [] if self.tokens is None else [{"token_in": list(self.tokens)}]
        found += [] if self.window == (0, LONGEST) else [{"window": list(self.window)}]
        return found or ["all"]


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook. ``op``: a spec like "rotate:c=-1". ``params``: prefix of its tensors, which are named
    ``PARAMS.LAYER.NAME``."""

    site: str
    layers: tuple[int, ...]
    op: str
    gate: Gate = field(default_factory=Gate)
    params: str = "hook"

    @property
    def method(self) -> Op:
        """The operation. Raises ConfigError for a spec that names none, and for one that names a file of code: a set is
        data, which somebody else may have written."""
        if technique.is_file(self.op):
            raise ConfigError(f"op {self.op[:80]!r} is a file of code, and a set names an installed operation")
        return technique.load(OPS, self.op, Op)

    def described(self) -> str:
        """One line for lists."""
        gate = self.gate
        rows = "all rows" if gate.tokens is None else f"rows of {len(gate.tokens)} tokens"
        rows += " from the prompt's last on" if gate.answers else ""
        rows += "" if gate.window == (0, LONGEST) else f" at positions {gate.window[0]} to {gate.window[1] - 1}"
        return f"{self.op} at {self.site} of {len(self.layers)} layers, {rows}"


@dataclass(frozen=True, slots=True)
class Made:
    """The model that a set was made for. ``hash``: of its checkpoint ("": any with the same shape)."""

    layers: int
    heads: int
    head_dim: int
    hidden_size: int
    hash: str = ""


@dataclass(frozen=True, slots=True)
class HookSet:
    """Hooks that act together. ``tensors``: by stored name. ``key``: hex digest of all that decides what they do."""

    name: str
    path: str
    hooks: tuple[Hook, ...]
    tensors: dict[str, torch.Tensor]
    key: str
    made: Made | None = None

    @property
    def info(self) -> HookInfo:
        methods = [hook.method for hook in self.hooks]
        return HookInfo(
            name=self.name,
            path=self.path,
            key=self.key,
            answers=self.hooks[0].gate.answers,
            changes_kv=not all(method.records for method in methods),
            parts=tuple(hook.described() for hook in self.hooks),
        )

    def of_layer(self, hook: Hook, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of one hook for one layer, by their last name."""
        prefix = f"{hook.params}.{layer}."
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


def read_set(name: str, folder: Path) -> HookSet:
    """Read a set from its folder. Raises ConfigError that names the folder and what is wrong with it."""
    refuse_special(folder, f"--hook {name}")
    try:
        card = json.loads((folder / CARD).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"--hook {name}={folder}: no set of hooks can be read from {CARD} ({e}). `kvasir lab steer` writes one."
        ) from e
    digest = hashlib.blake2b(digest_size=16)
    try:
        tensors = _read_tensors(folder / WEIGHTS)
        digest.update((folder / WEIGHTS).read_bytes() if tensors else b"")
    except (OSError, ConfigError) as e:
        raise ConfigError(f"--hook {name}={folder}: {WEIGHTS}: {e}") from e
    try:
        digest.update(json.dumps(card.get("hooks"), sort_keys=True).encode())
        made = _read_made(card["model"]) if card.get("model") else None
        hooks = tuple(_read_hook(one) for one in card["hooks"])
        _check(hooks)
    except (ConfigError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"--hook {name}={folder}: {CARD}: {e}") from e
    return HookSet(name, str(folder), hooks, tensors, digest.hexdigest(), made)


def write_set(
    folder: Path,
    hooks: list[Hook],
    tensors: Mapping[str, torch.Tensor],
    made: Made | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a set as a folder, with what ``card`` says about how it was made. Raises ConfigError for a set that could
    not be read."""
    from safetensors.torch import save_file

    _check(tuple(hooks))
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file({name: x.float().contiguous().clone() for name, x in tensors.items()}, folder / WEIGHTS)
    listed = [
        {"site": h.site, "layers": list(h.layers), "gate": h.gate.written(), "op": h.op, "params": h.params}
        for h in hooks
    ]
    facts = {} if made is None else {"model": {name: getattr(made, name) for name in Made.__dataclass_fields__}}
    (folder / CARD).write_text(json.dumps({**facts, "hooks": listed, **(card or {})}, indent=1) + "\n")
    return folder


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a set in fp32; none where there is no file. Raises ConfigError for a damaged file and for a tensor
    that holds NaN or infinity."""
    if not file.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name: x.float() for name, x in load_file(file).items()}
    except SafetensorError as e:
        raise ConfigError(str(e)) from e
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ConfigError(f"'{name}' holds NaN or infinity")
    return tensors


def _read_made(given: dict[str, Any]) -> Made:
    """The model that a card names. Raises ConfigError and TypeError."""
    made = Made(**given)
    for name in ("layers", "heads", "head_dim", "hidden_size"):
        if type(getattr(made, name)) is not int:
            raise ConfigError(f"model: {name} is no integer")
    if not isinstance(made.hash, str):
        raise ConfigError("model: hash is no text")
    return made


def _read_hook(given: dict[str, Any]) -> Hook:
    known = ("site", "layers", "gate", "op", "params")
    for name in given:
        if name not in known:
            raise ConfigError(f"a hook has no '{name}'; it has {', '.join(known)}.{nearest(name, list(known))}")
    for name, kind in (("site", str), ("layers", list), ("op", str), ("params", str)):
        if name in given and not isinstance(given[name], kind):
            raise ConfigError(f"{name} is {str(given[name])[:80]!r}, expected {kind.__name__}")
    gate = Gate.read(given.get("gate", "all"))
    return Hook(given["site"], tuple(given["layers"]), given["op"], gate, given.get("params", "hook"))


def _check(hooks: tuple[Hook, ...]) -> None:
    if not 0 < len(hooks) <= MAX_HOOKS:
        raise ConfigError(f"a set has 1 to {MAX_HOOKS} hooks, not {len(hooks)}")
    for hook in hooks:
        if hook.site not in SITES:
            raise ConfigError(f"there is no site '{hook.site}'; there are {', '.join(SITES)}")
        if not hook.layers or any(type(layer) is not int or layer < 0 for layer in hook.layers):
            raise ConfigError(f"layers must be a list of numbers from 0 on, not {list(hook.layers)}")
        hook.method  # noqa: B018 - an unknown operation is refused here
    if len({hook.gate.answers for hook in hooks}) > 1:
        raise ConfigError(
            "some hooks have the gate 'last_prompt_on' and some have not, and a set acts from one position on. Give it "
            "to all hooks or to none, or use a 'window' for a hook that begins later."
        )
