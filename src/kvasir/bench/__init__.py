"""Measurements: engines and servers compared with a peer in the same run, and the tables and plots of their results."""
