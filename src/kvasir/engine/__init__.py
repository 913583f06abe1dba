"""The engine: plan, launch and commit steps, and own every request, page and seat while it runs."""
