"""The ways to run a step on a device, from a plan to the tokens that were drawn."""
