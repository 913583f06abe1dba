"""Calibration of hooks: states recorded through the engine, probes and directions fitted to them, written as a set."""
