"""Explanations for requests that no route serves: what is wrong with the path or method, the nearest route, and what is
served. Most of them come from a base URL that ends one step too early or too late."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Beginnings of paths that other servers serve: whose they are, and the route here that does it.
FOREIGN = {
    "/api/generate": ("Ollama's API", "/v1/completions"),
    "/api/tags": ("Ollama's API", "/v1/models"),
    "/api/ps": ("Ollama's API", "/v1/models"),
    "/api/show": ("Ollama's API", "/v1/models"),
    "/api/version": ("Ollama's API", "/version"),
    "/api/embed": ("Ollama's API", "/v1/embeddings"),
    "/api/": ("Ollama's API", "/v1/chat/completions"),
    "/generate": ("TGI's and SGLang's API", "/v1/completions"),
    "/completion": ("llama.cpp's API", "/v1/completions"),
    "/openai/deployments/": ("Azure's API", "/v1/chat/completions"),
    "/v1/complete": ("Anthropic's older API", "/v1/messages"),
    "/v1beta/": ("Gemini's API", "/v1/chat/completions"),
}
# Routes that a flag switches on.
FLAGS = {"/tokenizer_info": "--enable-tokenizer-info-endpoint"}
BASE = "http://HOST:PORT/v1"
# Longest path that a message repeats.
MAX_SHOWN = 120


class Served(NamedTuple):
    """A route: its path with placeholders, the pattern of paths that it takes, and its methods."""

    path: str
    pattern: re.Pattern[str]
    methods: frozenset[str]


def served(routes: Iterable[Any]) -> list[Served]:
    """The routes of an app that its description lists."""
    listed = (route for route in routes if getattr(route, "include_in_schema", False))
    return [Served(route.path, route.path_regex, frozenset(route.methods)) for route in listed]


def methods_at(path: str, routes: Iterable[Served]) -> list[str]:
    """The methods that are served at a path; HEAD goes with GET."""
    methods = {method for route in routes if route.pattern.match(path) for method in route.methods}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def explain_path(path: str, routes: list[Served]) -> str:
    """The message of a 404."""
    shown = f"no route serves {path[:MAX_SHOWN]}"
    listed = f"Served: {_list(routes)}"
    if flag := FLAGS.get(path.rstrip("/")):
        return f"{shown}. It is switched on with {flag}. {listed}"
    if path.rstrip("/") == "/v1":
        return f"{shown}: it is the base URL, under which routes stand. {listed}"
    target, causes = _repaired(path, routes)
    if methods_at(target, routes):
        return f"{shown}: {'; '.join(causes)}. The route is {_named(target, routes)}. {listed}"
    foreign = re.sub("^/v1(?=/api/)", "", target)
    whose = next((start for start in sorted(FOREIGN, key=len, reverse=True) if foreign.startswith(start)), None)
    if whose is not None:
        name, instead = FOREIGN[whose]
        instead = instead if methods_at(instead, routes) else "/v1/chat/completions"
        return (
            f"{shown}: that is {name}, and this server speaks OpenAI's and Anthropic's. "
            f"Use {_named(instead, routes)} (base URL of OpenAI's clients: {BASE}). {listed}"
        )
    near = difflib.get_close_matches(target[:MAX_SHOWN], [r.path for r in routes], n=1, cutoff=0.75)
    hint = f". The nearest route is {_named(near[0], routes)}" if near else ""
    return f"{shown}{hint}. {listed}"


def explain_method(method: str, path: str, methods: list[str]) -> str:
    """The message of a 405."""
    return f"{method[:20]} is not served at {path[:MAX_SHOWN]}; use {' or '.join(m for m in methods if m != 'HEAD')}"


def _repaired(path: str, routes: list[Served]) -> tuple[str, list[str]]:
    """The path without what usually goes wrong, and a sentence for each thing that was."""
    causes = []
    if "//" in path:
        path = re.sub("/+", "/", path)
        causes.append("it has a double slash: take the slash at the end of the base URL away")
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/")
        causes.append("it ends in a slash: leave that away")
    if path.startswith("/v1/v1/"):
        path = re.sub(r"^(/v1)+(?=/)", "/v1", path)
        causes.append(
            "it has /v1 twice, because this client adds it to a base URL that ends in it: set that to http://HOST:PORT"
        )
    # A base URL that is the address of a route, to which the client adds the route again.
    for route in sorted((r.path for r in routes if r.path.startswith("/v1/")), key=len, reverse=True):
        rest = path.removeprefix(route)
        if rest != path and rest.startswith("/") and not methods_at(path, routes):
            for again in (rest, "/v1" + rest):
                if methods_at(again, routes):
                    return again, [*causes, f"the base URL names a route: end it in /v1, as in {BASE}"]
    if not path.startswith("/v1/") and not methods_at(path, routes) and methods_at("/v1" + path, routes):
        path = "/v1" + path
        causes.append(f"the base URL lacks /v1: set it to {BASE}")
    return path, causes


def _named(path: str, routes: list[Served]) -> str:
    exact = {method for route in routes if route.path == path for method in route.methods}
    methods = exact or {method for method in methods_at(path, routes) if method != "HEAD"}
    return f"{'/'.join(sorted(methods))} {path}"


def _list(routes: list[Served]) -> str:
    methods: dict[str, set[str]] = {}
    for route in routes:
        methods.setdefault(route.path, set()).update(route.methods)
    return ", ".join(f"{'/'.join(sorted(names))} {path.replace(':path', '')}" for path, names in methods.items())
