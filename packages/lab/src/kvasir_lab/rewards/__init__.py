"""Models that say how likely the beginning of a reply is to become right, trained on a model's own replies."""
