"""The torch-free side of the engine: validate requests, start and watch the engine process, and lose no token."""
