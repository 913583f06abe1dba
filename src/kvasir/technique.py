"""How a method becomes a switch: found by name, configured by one string, refused when it cannot work.

A technique is one module in its seam's folder (``kvasir/kv/codecs/int4.py`` is the codec ``int4``). The module holds one
subclass of the seam's base class and, when it has parameters, a frozen dataclass ``Config``. No list, enum or import
anywhere else names it. ``load("kvasir.kv.codecs", "int4:order=64,rotate_v=true", Codec)`` finds and builds it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from kvasir.errors import ConfigError, nearest


class Technique:
    """Base of everything that is chosen by name. The first line of the module's docstring describes it in lists.

    ``exact``: the same tokens as the plain engine (CPU exact mode, every temperature). ``affects_kv``: whether it changes
    the bytes in the cache; it then becomes part of the prefix key. ``None`` (undeclared) turns the prefix cache off.
    """

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    affects_kv: ClassVar[bool | None] = None

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def conflicts(self, others: list[Technique]) -> list[str]:
        """Sentences that say why this cannot run with ``others``, each naming the nearest working choice."""
        return []

    def fingerprint(self) -> tuple:
        """What goes into the prefix key when ``affects_kv``: the name and every parameter."""
        return (self.name, *(dataclasses.astuple(self.config) if self.config is not None else ()))


T = TypeVar("T", bound=Technique)


def names(package: str) -> list[str]:
    """The techniques of a seam: the public modules of its package, without importing them."""
    root = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(root.__path__) if not m.name.startswith("_"))


def find(package: str, name: str, base: type[T]) -> tuple[type[T], type | None]:
    """The technique's class and its Config (None: no parameters). Raises ConfigError with the choices."""
    choices = names(package)
    if name not in choices:
        raise ConfigError(f"no {package.rsplit('.', 1)[-1]} named '{name}'; there are {', '.join(choices)}.{nearest(name, choices)}")
    module = importlib.import_module(f"{package}.{name}")
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__]
    assert len(classes) == 1, f"{module.__name__} must define exactly one {base.__name__}, found {len(classes)}"
    classes[0].name = name
    return classes[0], getattr(module, "Config", None)


def load(package: str, spec: str, base: type[T]) -> T:
    """Build ``name:key=value,key=value``. Raises ConfigError for an unknown name, key or value."""
    name, _, rest = spec.partition(":")
    cls, config = find(package, name.strip().replace("-", "_"), base)
    pairs = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
    if config is None:
        if pairs:
            raise ConfigError(f"'{name}' takes no options, got {', '.join(pairs)}")
        return cls()
    fields = {f.name: f for f in dataclasses.fields(config)}
    kinds = get_type_hints(config)
    values = {}
    for key, text in pairs.items():
        if key not in fields:
            raise ConfigError(f"'{name}' has no option '{key}'; it has {', '.join(fields)}.{nearest(key, fields)}")
        values[key] = _parse(f"{name}:{key}", text, kinds[key])
    return cls(config(**values))


def _parse(where: str, text: str, kind: Any) -> Any:
    """``kind``: bool, int, float, str, or a Literal of words."""
    if get_origin(kind) is Literal:
        words = get_args(kind)
        if text not in words:
            raise ConfigError(f"{where}={text!r}: expected one of {', '.join(words)}.{nearest(text, words)}")
        return text
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        value = kind(text)
    except (ValueError, KeyError) as e:
        raise ConfigError(f"{where}={text!r}: expected {kind.__name__}") from e
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where}={text!r}: expected a finite number")
    return value


def check_conflicts(techniques: list[Technique]) -> None:
    """Refuse a combination that cannot work, with every reason at once. Raises ConfigError."""
    reasons = [r for t in techniques for r in t.conflicts([o for o in techniques if o is not t])]
    if reasons:
        raise ConfigError("this combination is not supported:\n  " + "\n  ".join(reasons))


def prefix_fingerprint(techniques: list[Technique]) -> tuple | None:
    """What the techniques add to the prefix key, or None when one does not declare ``affects_kv`` (no caching then)."""
    if any(t.affects_kv is None for t in techniques):
        return None
    return tuple(t.fingerprint() for t in techniques if t.affects_kv)
