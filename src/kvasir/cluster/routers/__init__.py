"""Routers: one file a rule by which requests are spread over replicas; the seam is ``cluster.router``."""
