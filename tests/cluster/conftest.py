"""The fixtures of the client's tests, which replicas must pass, too."""

from tests.cli.conftest import kvasir  # noqa: F401
from tests.client.conftest import importable, nothing_left_behind  # noqa: F401
