"""Checks and timings of kernels and of the steps made of them: `python -m kvasir_lab.kernels NAME OUT.json`.

Each module is one experiment: its docstring says what it does, ``arguments(parser)`` adds its options, and
``run(options, report)`` does the work. ``frame.py`` and ``pages.py`` hold what they share.
"""
