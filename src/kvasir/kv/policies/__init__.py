"""KV policies, one a file."""
