"""Measurements of kvasir's parts, which only its developers run."""
