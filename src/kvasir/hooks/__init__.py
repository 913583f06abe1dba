"""Hooks on hidden states: what a set of hooks is, how it is read, and the operations that it may name."""
