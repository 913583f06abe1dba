"""The commands that kvasir-lab adds to ``kvasir``, by the entry points of its pyproject.toml."""
