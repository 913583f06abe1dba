"""Engines that run in a process of their own, ours among them: ``python -m kvasir.bench.peers.NAME`` is a driver.

A driver reads commands as JSON lines on stdin and answers each on stdout (``channel``); ``worker`` is the other side.
"""
