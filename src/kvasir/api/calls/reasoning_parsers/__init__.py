"""Reasoning parsers: each splits reasoning from the answer in one output format. One file, one format."""
