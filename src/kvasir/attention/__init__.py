"""Attention over paged keys and values: the backend seam, and what several backends share."""
