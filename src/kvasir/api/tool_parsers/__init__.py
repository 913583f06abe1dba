"""Tool-call formats, one module each, found by name."""
