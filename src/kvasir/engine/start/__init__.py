"""The start of an engine, from settings to ready: what is built, chosen and measured before the first request."""
