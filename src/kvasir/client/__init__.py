"""The torch-free side of the engine: validates requests, starts and watches the engine process, loses no token."""
