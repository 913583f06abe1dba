"""Test-time scaling over HTTP: strategies for one answer, and runs over many problems."""
