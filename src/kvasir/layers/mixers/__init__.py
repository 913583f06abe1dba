"""Mixers: the layers that mix information between positions. One file, one mixer."""
