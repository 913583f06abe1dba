"""The process of a trainer ends with its engine, whatever it is doing."""

from __future__ import annotations

import os
import sys
import time

from kvasir.learn import link
from kvasir.learn.messages import Order

DEAF = """
import socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[-1] + "/socket")
time.sleep(1e6)
"""


def test_a_trainer_that_does_not_listen_is_gone_with_its_engine(tmp_path):
    trainer = link.Trainer(tmp_path, lambda: Order(model="m", kind="k"), [sys.executable, "-S", "-c", DEAF])
    until = time.monotonic() + 60
    while trainer._channel is None and time.monotonic() < until:
        time.sleep(0.01)
    pid = trainer.pid
    assert pid and os.path.exists(f"/proc/{pid}")
    trainer.close()
    assert trainer.pid is None and not os.path.exists(f"/proc/{pid}") and not tmp_path.exists()
