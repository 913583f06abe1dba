"""Models that kvasir-lab brings, one folder each, which may be given by name wherever a model is asked for."""
