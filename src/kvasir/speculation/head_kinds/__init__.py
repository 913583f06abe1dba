"""Kinds of trained heads, one a file: a kind is found by the name of its file, which is that of its drafter."""
