"""``kvasir lab``: show the lab's tasks and their samples, train its models."""

from kvasir.cli.command import group

lab = group(__name__, 110, "Tasks with exact checkers, and small models trained on them.")
