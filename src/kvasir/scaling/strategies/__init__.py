"""Strategies, one a file."""
