"""Training of the lab's models: recipes, batches, the run with its saved state, and the model card."""
