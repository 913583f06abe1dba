"""The torch-free side of the engine: it validates requests, starts and watches the engine process, and loses no
token."""
