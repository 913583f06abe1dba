"""Package of the stand-in for vLLM's server."""
