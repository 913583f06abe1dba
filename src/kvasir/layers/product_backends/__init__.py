"""Product backends: one module each."""
