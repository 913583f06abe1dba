"""The front ends: the HTTP server with its routes, and the Python API."""
