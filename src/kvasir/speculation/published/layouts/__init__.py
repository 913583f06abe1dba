"""Layouts of published heads, one a file: how a folder is recognised, and which of its tensors fill which weight."""
