"""Kernels in C for decode steps on a CPU: compiled at first use, and run in one call a step."""
