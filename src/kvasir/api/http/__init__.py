"""Room for what every route stands on: bodies, limits, keys, errors, streams, metrics, the way to the engine."""
