"""Variants of rows: adapters and sets of hooks, and the slots of the device that hold them."""
