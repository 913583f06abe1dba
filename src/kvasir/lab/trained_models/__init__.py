"""Whole models that are trained on to draft for themselves, one file a kind (`kvasir.lab.drafters.kind`)."""
