"""Layers of a decoder in plain torch: weights, linear products, norms and rotary positions."""
