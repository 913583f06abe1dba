"""Attention backends: each computes attention for the rows of a step. One file, one backend."""
