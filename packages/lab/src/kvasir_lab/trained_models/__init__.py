"""Whole models that are trained on to draft for themselves, one file a kind (`kvasir_lab.drafters.kind`)."""
