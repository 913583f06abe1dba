"""The front ends: the Python API and the HTTP server, with OpenAI's names and vLLM's extras."""
