"""Training of drafters: sample replies of the target model, fit a drafter to them, and write its card."""
