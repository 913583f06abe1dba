"""Drafts and forced chains in the step loop, and what a drafter learns while it serves."""
