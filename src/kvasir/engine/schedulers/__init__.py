"""Scheduling policies: each orders the requests that wait for rows. One file, one policy."""
