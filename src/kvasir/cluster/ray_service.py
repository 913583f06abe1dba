"""The Ray Serve application of KubeRay's RayService: it keeps ``kvasir serve --cluster auto`` running on the head.

Ray Serve starts it, looks at its health and starts it again. Clients talk to kvasir's own port, so neither requests nor
tokens pass through Serve (``deploy/kubernetes/rayservice.yaml``). ``ray[serve]`` is imported when Serve calls ``app``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

# Seconds that the server gets to drain and to end, below the manifest's terminationGracePeriodSeconds.
END_SECONDS = 80.0
# Resource of Ray that only the head has.
HEAD = "node:__internal_head__"


class Server:
    """A supervised server. ``command``: the arguments of ``kvasir serve``."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "kvasir", "serve", *command, "--cluster", "auto"])

    def check_health(self) -> None:
        """Raise RuntimeError when the server has ended, so that Serve starts another one. A server that runs tells
        Kubernetes itself how it is: its probes ask it directly."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"kvasir serve has ended with status {code}: its log says why")

    def close(self) -> None:
        """Drain the server and wait for its end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


def app(args: dict[str, Any]) -> Any:
    """Build the application for Ray Serve. ``args``: {"command": arguments of ``kvasir serve``}."""
    from ray import serve

    options = {"num_cpus": 0, "resources": {HEAD: 0.001}}
    deployment = serve.deployment(
        Server,
        name="kvasir",
        num_replicas=1,
        ray_actor_options=options,
        health_check_period_s=10,
        graceful_shutdown_timeout_s=END_SECONDS,
    )
    return deployment.bind(list(args["command"]))
