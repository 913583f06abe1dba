"""The Jinja environment of chat templates: what a template may do in this process, by rule.

Every operation is on a list of those that cost no more than a constant times their operands, and everything that makes
a text or a list is measured by a ``Meter``. Whatever else a template does raises ``Apart``: it is rendered in a process
of its own (``template_process``), where memory and time have hard limits and all of Jinja is there. Nothing is computed
while a template is compiled: constants are not folded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Most characters of a prompt or of a text that a template makes, and most parts of a list.
MAX_CHARS = 1 << 25
# Most bits of a number.
MAX_BITS = 1 << 12
# Characters that one rendering may make in this process, and those that an entry of a list counts as.
ROOM, ENTRY = 1 << 25, 8
# Characters that may be read between two looks at the clock.
STRIDE = 1 << 16
# Deepest indentation of JSON in this process.
MAX_INDENT = 16
# Name of the meter among a template's variables. Jinja has no such identifier, so no template can read or replace it.
METER = "meter!"
# The filters whose output is no longer than a small multiple of what they are given. Four others (tojson, replace,
# join, round) say beforehand how long theirs will be.
FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float int items last length list lower map reject "
    "rejectattr reverse safe select selectattr sort string title trim unique upper".split()
)
# The methods of which that is true, by type.
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper".split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
}
# The parts of a template that are known to cost no more than their operands, with the watch that ``_Watch`` adds.
NODES = frozenset(
    {
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock),
        *(nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock, nodes.Scope, nodes.Break, nodes.Continue),
        *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
        *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
        *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Add, nodes.Sub),
        *(nodes.Mod, nodes.Pow, nodes.Not, nodes.Neg, nodes.Pos, nodes.And, nodes.Or),
    }
)
TESTS = frozenset(jinja2.defaults.DEFAULT_TESTS)
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
SCALARS = (int, float, type(None), jinja2.Undefined)


class LimitError(Exception):
    """A template took too long or grew too large."""


class Apart(Exception):
    """A template does what may cost more than its operands. ``always``: the template does, whatever it is given."""

    def __init__(self, always: bool = True) -> None:
        super().__init__("the template has to be rendered in a process of its own")
        self.always = always


class Meter:
    """The limits of one rendering: ``seconds`` of CPU time of this thread and ``room`` characters to make (None: any
    number, in a process that has limits of its own).

    The time between two checks counts for at most half of the limit. The interpreter may collect its garbage there,
    which takes long in a large process and is not the template's work.
    """

    def __init__(self, seconds: float, room: int | None = ROOM) -> None:
        self.seconds, self.left, self.room = seconds, seconds, room
        self.seen = time.thread_time()
        self._unseen = 0
        self._weights: dict[int, tuple[Any, int]] = {}  # by id: the list, which is kept so that the id stays its own

    def check(self) -> None:
        """Raise LimitError when the time is over."""
        now = time.thread_time()
        self.left -= min(now - self.seen, self.seconds / 2)
        self.seen, self._unseen = now, 0
        if self.left <= 0:
            raise LimitError(f"took longer than {self.seconds:g} s")

    def reads(self, value: Any) -> None:
        """Count a value that is about to be read whole."""
        self._unseen += 16 if value is None or value is True or value is False else self.weight(value)
        if self._unseen > STRIDE:
            self.check()

    def makes(self, length: int, each: int = 1) -> None:
        """Count ``length`` characters, or entries of a list, that are made."""
        if length > MAX_CHARS:
            raise LimitError("makes a text that is too long")
        if self.room is not None:
            self.room -= length * each
            if self.room < 0:
                raise Apart(always=False)

    def made(self, value: Any) -> None:
        """Count a text, a list or a number that was made. Lists may hold one another many times: what counts against
        the limit of one is what it would take to write it."""
        if isinstance(value, str):
            self.makes(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.makes(len(value), ENTRY)
            if self.weight(value) > MAX_CHARS:
                raise LimitError("makes a list that is too large")
        else:
            self.reads(value)

    def weight(self, value: Any) -> int:
        """Characters that a value takes when it is written, roughly. Raises Apart for one that cannot be measured."""
        if isinstance(value, str):
            return len(value) + 16
        if isinstance(value, int):
            return 16 + value.bit_length() // 3
        if isinstance(value, (list, tuple, dict)):
            return self._container(value)
        if isinstance(value, VIEWS):
            return self._container(tuple(value))
        if isinstance(value, (*SCALARS, Namespace, Macro, LoopContext, range)) or self.room is None:
            return 16
        raise Apart

    def _container(self, value: Any) -> int:
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        total = 16
        for entry in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            if isinstance(entry, str):
                total += len(entry) + 16
            elif isinstance(entry, (list, tuple, dict)):
                total += self._container(entry)
            elif isinstance(entry, SCALARS):
                total += self.weight(entry)
            elif self.room is not None:
                raise Apart  # a namespace, say, which shows by other means what it holds
        self._weights[id(value)] = value, total
        return total


# ---------------------------------------------------------------------------------------------------------- the watch


def _meter(context: Context) -> Meter | None:
    return context.parent.get(METER)


@pass_context
def _each(context: Context, items: Iterable) -> Iterator:
    meter = context.parent[METER]
    for item in items:
        meter.check()
        yield item


@pass_context
def _read(context: Context, value: Any) -> Any:
    context.parent[METER].reads(value)
    return value


@pass_context
def _made(context: Context, value: Any) -> Any:
    context.parent[METER].made(value)
    return value


@pass_context
def _joined(context: Context, parts: Sequence[Any]) -> str:
    return "".join([_written(context, part) for part in parts])


@pass_context
def _written(context: Context, value: Any) -> str:
    """A value as text, counted."""
    meter = context.parent[METER]
    if isinstance(value, str):
        meter.makes(len(value))
        meter.reads(value)
        return value
    if not isinstance(value, (*SCALARS, list, tuple, dict)) and meter.room is not None:
        raise Apart  # the text of a generator or a macro
    meter.reads(value)
    text = str(value)
    meter.makes(len(text))
    return text


class _Watch(NodeTransformer):
    """The rewriting of a template so that what it makes and reads is counted: loops (each turn), comparisons, tests and
    subscripts (what they read), lists, slices, joined texts and captured blocks (what they make)."""

    @staticmethod
    def _filtered(node: nodes.Expr | None, name: str, lineno: int) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=lineno)

    def _reading(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else self._filtered(node, "read!", node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "each!", node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._reading(node.expr)
        for operand in node.ops:
            operand.expr = self._reading(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self.generic_visit(node)
        node.args = [self._reading(arg) for arg in node.args]
        if node.args:
            node.node = self._reading(node.node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._filtered(node, "made!", node.lineno)
        node.arg = self._reading(node.arg)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), "joined!", node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = self._filtered(node.filter, "made!", node.lineno)
        return node

    def _literal(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        plain = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if plain else self._filtered(node, "made!", node.lineno)

    visit_List = visit_Dict = _literal

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._literal(node) if node.ctx == "load" else self.generic_visit(node)


class _Generation(Extension):
    """The tag ``{% generation %}...{% endgeneration %}``, which marks
    assistant text for training and does nothing here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ------------------------------------------------------------------------------------------------------------ filters


def _watched(name: str, plain: Callable) -> Callable:
    """A filter that counts what it reads and makes; one that is on no list raises Apart outside a process of its own.

    All filters get the context, so that none is computed while the template is compiled."""
    takes = getattr(plain, "jinja_pass_arg", None)
    kind = takes.name if takes is not None else ""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.parent[METER]
        if meter.room is not None:
            if name in FILTERS:
                if not isinstance(value, Iterator):
                    meter.reads(value)
                if name == "string":
                    return _written(context, value)
            elif name in BOUNDS:
                value = BOUNDS[name](meter, context, value, args, kwargs)
            else:
                raise Apart
            for arg in (*args, *kwargs.values()):
                meter.reads(arg)
        else:
            meter.check()
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = plain(*first.get(kind, ()), value, *args, **kwargs)
        if isinstance(result, Iterator):
            return _each(context, result)
        meter.made(result)
        return result

    return run


def _bound_of_json(meter: Meter, context: Context, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = dict(zip(("ensure_ascii", "indent"), args)) | kwargs
    indent = names.get("indent")
    width = len(indent) if isinstance(indent, str) else indent or 0
    if not isinstance(width, int) or width > MAX_INDENT or names.get("separators"):
        raise Apart
    # No part stands deeper than the recursion of the writer reaches; six characters for one that is escaped.
    weight = meter.weight(value)
    if weight * (6 + width * _depth(value)) > MAX_CHARS:
        raise Apart(always=False)
    meter.reads(value)
    return value


def _depth(value: Any) -> int:
    """Levels of lists in a value. The caller has measured it, so it is no longer than the largest list."""
    found, level = 0, [value]
    while level:
        inner = [v for v in level if isinstance(v, (list, tuple, dict))]
        level = [e for v in inner for e in (v.values() if isinstance(v, dict) else v)]
        found += bool(inner)
    return found


def _bound_of_replace(meter: Meter, context: Context, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    old, new = (*args, None, None)[:2]
    if kwargs or not (isinstance(value, str) and isinstance(old, str) and isinstance(new, str)):
        raise Apart
    meter.reads(value)
    meter.makes(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
    return value


def _bound_of_join(meter: Meter, context: Context, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = dict(zip(("d", "attribute"), args)) | kwargs
    between = names.get("d", "")
    if names.get("attribute") is not None or not isinstance(between, str):
        raise Apart
    found = list(_each(context, value))
    parts = [part if isinstance(part, str) else _written(context, part) for part in found]
    meter.makes(sum(map(len, parts)) + len(between) * len(parts))
    return parts


def _bound_of_round(meter: Meter, context: Context, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    digits = (dict(zip(("precision", "method"), args)) | kwargs).get("precision", 0)
    if not isinstance(digits, int) or abs(digits) > MAX_INDENT or not isinstance(value, (int, float)):
        raise Apart
    return value


BOUNDS = {
    "tojson": _bound_of_json,
    "replace": _bound_of_replace,
    "join": _bound_of_join,
    "round": _bound_of_round,
}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _bounded_join(parts: Iterable[str]) -> str:
    """The text of a captured block or a macro."""
    parts = list(parts)
    if sum(map(len, parts)) > MAX_CHARS:
        raise LimitError("makes a text that is too long")
    return "".join(parts)


# -------------------------------------------------------------------------------------------------------- environment


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. It raises LimitError in a template that exceeds a limit, and Apart in one that
    does more than is on the lists, unless the meter has no ``room``."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(_bounded_join)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            finalize=_written,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _watched(name, plain) for name, plain in self.filters.items()}
        self.filters |= {"each!": _each, "read!": _read, "made!": _made, "joined!": _joined}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        self._functions = (_raise, _strftime_now, safe_range, Namespace, dict)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Watch().visit(super()._parse(source, name, filename))

    def plain(self, source: str) -> nodes.Template:
        """The template as it is written, without the watch."""
        return super()._parse(source, None, None)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(__context)
        if meter is not None:
            meter.check()
            if meter.room is not None:
                self._check_call(meter, __context, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if meter is not None and isinstance(result, (str, list, tuple, dict)):
            meter.made(result)
        return result

    def _check_call(
        self, meter: Meter, context: Context, obj: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise Apart unless ``obj`` is on the lists."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, (Macro, LoopContext, jinja2.Undefined)) or isinstance(owner, LoopContext):
            return
        if any(obj is function for function in self._functions):
            for arg in args:
                meter.reads(arg)
            return
        name = getattr(obj, "__name__", "")
        if type(owner) is str and name == "replace" and len(args) == 2:
            _bound_of_replace(meter, context, owner, args, kwargs)
            return
        if type(owner) is str and name == "join" and len(args) == 1 and isinstance(args[0], (list, tuple)):
            _bound_of_join(meter, context, args[0], (owner,), kwargs)
            return
        if name not in METHODS.get(type(owner), ()):
            raise Apart
        meter.reads(owner)
        for arg in args:
            meter.reads(arg)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = context.parent[METER]
        meter.check()
        sizes = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
        numbers = [v for v in (left, right) if isinstance(v, int)]
        if operator == "%" and isinstance(left, str) and meter.room is not None:
            raise Apart
        if len(numbers) == 2 and operator in ("*", "**"):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise LimitError("computes a number that is too large")
        if operator == "*" and sizes and numbers:
            meter.makes(sizes[0] * abs(numbers[0]), 1 if isinstance(left, str) or isinstance(right, str) else ENTRY)
        elif operator == "+" and sizes:
            meter.makes(sum(sizes), 1 if isinstance(left, str) else ENTRY)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (list, tuple)) and meter.weight(result) > MAX_CHARS:
            raise LimitError("makes a list that is too large")
        return result


def is_cheap(tree: nodes.Template) -> bool:
    """Whether a template consists of parts that may run in this process. What they are given may still raise Apart."""
    todo: list[nodes.Node] = [tree]
    while todo:
        node = todo.pop()
        if type(node) not in NODES or (isinstance(node, nodes.Test) and node.name not in TESTS):
            return False
        todo.extend(node.iter_child_nodes())
    return True
