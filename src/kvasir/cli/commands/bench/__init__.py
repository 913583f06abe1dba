"""``kvasir bench``: measurements of a server, or of an engine and its peers."""

from __future__ import annotations

import signal
import sys

from kvasir.cli.command import group


def ended_in_order() -> None:
    # `timeout` and service managers send SIGTERM; engines in processes of their own must end with this one.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


bench = group(__name__, 90, "Measure speed, and compare it with other engines.", callback=ended_in_order)
