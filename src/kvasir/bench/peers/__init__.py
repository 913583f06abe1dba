"""Benchmark peers: engines that run in their own process, kvasir among them. One file, one engine.

``python -m kvasir.bench.peers.NAME`` starts a driver. It reads commands as JSON lines on stdin and answers each on
stdout (``channel``); ``worker`` is the other side.
"""
