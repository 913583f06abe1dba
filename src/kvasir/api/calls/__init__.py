"""Tool calls and thinking in the text of models: the formats, their parsers, and the grammars that force them."""
