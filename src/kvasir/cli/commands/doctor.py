"""``kvasir doctor``."""

from __future__ import annotations

from kvasir.cli.arguments import (
    AsJSON,
)
from kvasir.cli.command import command


@command(40)
def doctor(as_json: AsJSON = False) -> None:
    """Say what this machine and installation can do. Slower fallbacks come with their reasons."""
    from kvasir.cli import doctor as command

    command.run(as_json)
