"""Scheduler policies (``engine/policy.py``), one a file."""
