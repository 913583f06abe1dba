"""Heads that other people publish, read from their folders: what their layouts share, and the layouts."""
