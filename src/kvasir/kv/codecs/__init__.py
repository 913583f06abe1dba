"""Codecs: each defines how keys and values are stored in a page. One file, one codec."""
