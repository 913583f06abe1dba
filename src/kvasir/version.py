"""The version of kvasir, by itself, so that every part can name it."""

__version__ = "0.1.0"
