"""Scheduler policies (``engine/schedule/policy.py``), one a file."""
