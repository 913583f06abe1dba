"""Speculative decoding: the drafter seam, draft trees, and the controller that decides how much to draft."""
