"""Techniques: methods that are found by name, configured by one string, and refused when they cannot work.

A technique is one module in its seam's folder (``kvasir/kv/codecs/int4.py`` is the codec ``int4``). The module holds
one subclass of the seam's base class and, when it has parameters, a frozen dataclass ``Config``. No list, enum or
import anywhere else names it. ``load("kvasir.kv.codecs", "int4_bdr:order=64,rotate_v=true", Codec)`` finds and builds
it.

The same module may live outside this package: as a file (``./int6.py:group=32``), or in an installed package that names
it in an entry point of the seam's group (``[project.entry-points."kvasir.kv.codecs"]  int6 = "my_lab.int6"``), which
makes it a name like any other. A file runs its code, so callers that take a spec from a stranger must refuse files
first (``is_file``).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from kvasir.errors import ConfigError, nearest
from kvasir.logs import log
from kvasir.plain_files import refuse_special


class Technique:
    """Base class of everything that is chosen by name. Lists show the first line of the module's docstring.

    ``exact``: gives the same tokens as the plain engine (in exact mode on a CPU, at every temperature). ``affects_kv``:
    changes the bytes in the cache, and so becomes part of the prefix key; None (undeclared) turns the prefix cache off.
    A technique reports bad options with a ConfigError from its Config or ``__init__``, before a model is loaded.
    """

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    affects_kv: ClassVar[bool | None] = None

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @property
    def ours(self) -> bool:
        """Whether the technique belongs to this package, whose tests check the promises of its seam."""
        return type(self).__module__.startswith("kvasir.")

    def conflicts(self, others: list[Technique]) -> list[str]:
        """The reasons why this cannot run with ``others``: sentences that each name the nearest working choice."""
        return []

    def fingerprint(self) -> tuple:
        """The technique's part of the prefix key when ``affects_kv``: its name and every parameter."""
        return (self.name, *(dataclasses.astuple(self.config) if self.config is not None else ()))


T = TypeVar("T", bound=Technique)
R = TypeVar("R")


def own(package: str) -> list[str]:
    """Names of kvasir's own techniques of a seam: the public modules of its package, which are not imported."""
    root = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(root.__path__) if not m.name.startswith("_"))


def names(package: str) -> list[str]:
    """Names of all techniques of a seam: kvasir's own, and those of installed packages."""
    return sorted({*own(package), *(e.name for e in importlib.metadata.entry_points(group=package))})


def is_file(spec: str) -> bool:
    """Whether a spec names a file of code and not an installed technique."""
    return spec.partition(":")[0].strip().endswith(".py")


def module(package: str, name: str) -> ModuleType | None:
    """Import the module of an installed technique, kvasir's own first; None when there is none of this name.

    Raises ConfigError when two packages offer the name.
    """
    if name in own(package):
        return importlib.import_module(f"{package}.{name}")
    found = {e.module for e in importlib.metadata.entry_points(group=package, name=name)}
    if len(found) > 1:
        raise ConfigError(
            f"'{name}' is offered by several installed packages ({', '.join(sorted(found))}): uninstall all but one"
        )
    if not found:
        return None
    target = found.pop()
    try:
        return importlib.import_module(target)
    except Exception as e:
        e.add_note(f"an installed package offers {target} as '{name}' ({package}): repair or uninstall the package")
        raise


def of_all(package: str, get: Callable[[str], R]) -> list[R]:
    """Return ``get(name)`` of every technique of a seam. An installed one that fails is left out with a warning,
    because nobody asked for it."""
    ours, found = own(package), []
    for name in names(package):
        try:
            found.append(get(name))
        except Exception as e:
            if name in ours:
                raise
            log.warning(
                "'%s' (%s) is left out: %s",
                name,
                package,
                "; ".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())]),
            )
    return found


def find(package: str, name: str, base: type[T]) -> tuple[type[T], type | None]:
    """Find a technique's class and its Config (None: no parameters).

    ``name``: an installed technique ("-" counts as "_"), or the path of a file, which gives the technique its name.
    Raises ConfigError for an unknown name, with the choices, and for a module that is no technique of this seam.
    """
    kind = package.rsplit(".", 1)[-1]
    if is_file(name):
        path = Path(name).expanduser()
        refuse_special(path)
        name = path.stem.replace("-", "_")
        if name in own(package):
            raise ConfigError(
                f"{path}: kvasir's own {kind} have a '{name}' already, and a name must say which method it is. "
                "Rename the file."
            )
        found = _from_file(path)
    else:
        name = name.replace("-", "_")
        found = module(package, name)
    if found is None:
        choices = names(package)
        raise ConfigError(f"no {kind} named '{name}'; there are {', '.join(choices)}.{nearest(name, choices)}")
    classes = [
        c
        for c in vars(found).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == found.__name__
    ]
    if len(classes) != 1:
        raise ConfigError(
            f"{found.__file__} must define exactly one subclass of {base.__module__}.{base.__name__}, and defines "
            f"{', '.join(c.__name__ for c in classes) or 'none'}. Move bases and helpers to another module."
        )
    if lacking := [n for n in dir(classes[0]) if getattr(getattr(classes[0], n), "__isabstractmethod__", False)]:
        raise ConfigError(
            f"{found.__file__}: {classes[0].__name__} must define {', '.join(lacking)} "
            f"(abstract in {base.__module__}.{base.__name__})"
        )
    classes[0].name = name
    return classes[0], getattr(found, "Config", None)


def find_also(package: str, name: str, base: type[T]) -> type[T]:
    """Find a technique's class by its name, or by another name that it says it goes by (``also``).
    Raises ConfigError like ``find``."""
    if not is_file(name) and (plain := name.replace("-", "_")) not in names(package):
        classes = of_all(package, lambda n: find(package, n, base)[0])
        name = next((c.name for c in classes if plain in getattr(c, "also", ())), name)
    return find(package, name, base)[0]


def _from_file(path: Path) -> ModuleType:
    """Import the module in ``path``, once per process. Its own exceptions pass through, for its author to see."""
    key = str(path.resolve())
    if key not in sys.modules:
        if not path.is_file():
            raise ConfigError(f"there is no file {path} (from {Path.cwd()})")
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)  # before it runs: dataclasses look up their module
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def options(config: type, name: str) -> dict[str, Any]:
    """The type of each option of a Config. Raises ConfigError for an option that no string could set."""
    wanted = f"the Config of '{name}' must be a frozen dataclass"
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConfigError(f"{wanted}: @dataclass(frozen=True)")
    kinds = get_type_hints(config)
    for f in dataclasses.fields(config):
        if kinds[f.name] not in (bool, int, float, str) and get_origin(kinds[f.name]) is not Literal:
            raise ConfigError(
                f"{wanted} of bool, int, float, str and Literal, which a string can set; {f.name} is {f.type}"
            )
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{wanted} that can be made without options: {f.name} has no default")
    return {f.name: kinds[f.name] for f in dataclasses.fields(config)}


def load(package: str, spec: str, base: type[T]) -> T:
    """Build a technique from ``name:key=value,key=value`` or ``path/to/name.py:key=value``.

    Raises ConfigError for an unknown name, key or value.
    """
    name, _, rest = spec.partition(":")
    cls, config = find(package, name.strip(), base)
    name = cls.name
    pairs = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
    if config is None:
        if pairs:
            raise ConfigError(f"'{name}' takes no options, got {', '.join(pairs)}")
        return cls()
    return cls(parse(config, name, pairs))


def parse(config: type, name: str, pairs: dict[str, str]) -> Any:
    """Build a Config from the texts of its options. Raises ConfigError that names ``name`` and the option."""
    kinds = options(config, name)
    values = {}
    for key, text in pairs.items():
        if key not in kinds:
            raise ConfigError(f"'{name}' has no option '{key}'; it has {', '.join(kinds)}.{nearest(key, kinds)}")
        values[key] = _parse(f"{name}:{key}", text, kinds[key])
    return config(**values)


def _parse(where: str, text: str, kind: Any) -> Any:
    """Parse an option's text as ``kind``: bool, int, float, str or a Literal.
    Raises ConfigError that names ``where``."""
    if get_origin(kind) is Literal:
        words = {str(value): value for value in get_args(kind)}
        if text not in words:
            raise ConfigError(f"{where}={text!r}: expected one of {', '.join(words)}.{nearest(text, words)}")
        return words[text]
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
    """Raise ConfigError with all reasons why the techniques cannot run together, if there are any."""
    reasons = [r for t in techniques for r in t.conflicts([o for o in techniques if o is not t])]
    if reasons:
        raise ConfigError("this combination is not supported:\n  " + "\n  ".join(reasons))


def prefix_fingerprint(techniques: list[Technique]) -> tuple | None:
    """The techniques' part of the prefix key, or None (no caching) when one of them does not declare ``affects_kv``."""
    if any(t.affects_kv is None for t in techniques):
        return None
    return tuple(t.fingerprint() for t in techniques if t.affects_kv)
