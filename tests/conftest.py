"""Signals for all tests: what the shell ignores (``nohup``, ``&``) would be ignored by every server under test."""

from __future__ import annotations

import signal

for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)
