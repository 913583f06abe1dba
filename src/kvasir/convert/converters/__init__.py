"""Converters: each rewrites a checkpoint into another one. One file, one converter."""
