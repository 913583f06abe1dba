"""Fixtures of the server tests: a server with the fake engine, shared by a module."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import httpx
import pytest

from tests.api.running import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Restore the engine after each test."""
    with running() as it:
        yield it
        it.idle()


@pytest.fixture(scope="session")
def certificates() -> ssl.SSLContext:
    """Reading them takes longer than most tests, which speak plain HTTP."""
    return httpx.create_ssl_context()


@pytest.fixture
def http(server: Running, certificates: ssl.SSLContext) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, verify=certificates) as client:
        yield client
