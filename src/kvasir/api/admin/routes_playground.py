"""The playground: a chat page and its style, scripts and libraries, served from the package.

The files are open without an API key, since a browser loads a page without one; the page then asks for the key. Only
files that the package holds have a path here, so no path leads anywhere else.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from kvasir.errors import RequestError

PAGE = "/"
FOLDER = "/playground/"
# Versions are part of the names of the libraries, so a name's content never changes.
LIBRARIES = FOLDER + "vendor/"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page may load files of this server and nothing else. Text becomes HTML through the sanitiser's policy alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class File(NamedTuple):
    """A file of the page: its bytes and the headers of its reply."""

    data: bytes
    headers: dict[str, str]


@functools.cache  # half a MiB that never changes
def files() -> dict[str, File]:
    """The files of the page by their paths on the server."""
    found = {}
    for path, entry in _walk(resources.files("kvasir.api").joinpath("playground"), FOLDER):
        if (kind := KINDS.get(path[path.rfind(".") :])) is None:
            continue
        data = entry.read_bytes()
        found[PAGE if path == FOLDER + "index.html" else path] = File(data, _headers(path, kind, data))
    return found


def _walk(folder: Traversable, path: str) -> list[tuple[str, Traversable]]:
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        found += _walk(entry, f"{path}{entry.name}/") if entry.is_dir() else [(path + entry.name, entry)]
    return found


def _headers(path: str, kind: str, data: bytes) -> dict[str, str]:
    lasting = "public, max-age=31536000, immutable" if path.startswith(LIBRARIES) else "no-cache"
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return HEADERS | {"content-type": f"{kind}; charset=utf-8", "cache-control": lasting, "etag": tag}


async def playground(http: Request) -> Response:
    """Send the page or one of its files; 304 where the browser has it already."""
    if (file := files().get(http.scope["path"])) is None:
        raise RequestError("the playground has no such file in this installation", status=404, code="not_found")
    known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.data, headers=file.headers)
