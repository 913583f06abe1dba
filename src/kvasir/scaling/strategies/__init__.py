"""Strategies: each spends more inference on a problem for a better or cheaper answer. One file, one strategy."""
