"""The logit processors: methods that steer what an answer draws, one file each."""
