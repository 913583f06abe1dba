"""Several replicas of the engine behind one front: placement, and the choice of a replica for each request."""
