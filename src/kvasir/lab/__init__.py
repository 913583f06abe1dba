"""The lab: tasks with exact checkers, the small models trained on them, and the measurement of answers."""
