"""The fixtures of the client's tests, which replicas must pass, too."""

from tests.client.conftest import importable, nothing_left_behind  # noqa: F401
