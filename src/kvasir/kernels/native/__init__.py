"""Kernels in C for decode steps on a CPU: compiled where they are used first, run in one call a step."""
