"""The routes of whoever runs the server: its state, adapters, weights, and the playground."""
