"""The Python API, without a server."""
