"""``kvasir lab steer``: calibrate hooks on hidden states."""

from kvasir.cli.command import group

steer = group(__name__, 50, "Calibrate hooks on hidden states (--hook).")
