"""Learning while serving: what the engine records of its verifications, and the process that trains drafters on it."""
