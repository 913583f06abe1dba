"""Decoding: from logits to drawn tokens, with penalties, filters, grammars and acceptance of drafts."""
