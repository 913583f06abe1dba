"""Recurrence backends, one file each: see `kvasir.layers.recurrence_backend`."""
