"""Checkpoint conversion: the converter seam, and streamed reading and writing of Hugging Face folders."""
