"""Tool-call parsers: each reads the tool calls of one output format. One file, one format."""
