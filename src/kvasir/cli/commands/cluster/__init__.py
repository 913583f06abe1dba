"""``kvasir cluster``: replicas on the hosts of a Ray cluster, as an operator sees them."""

from kvasir.cli.command import group

cluster = group(__name__, 100, "Look at replicas on the hosts of a Ray cluster.")
