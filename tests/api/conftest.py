"""Fixtures of the server tests: a server with the fake engine, shared by a module."""

from __future__ import annotations

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


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
