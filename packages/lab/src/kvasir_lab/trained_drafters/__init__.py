"""Drafters that can be trained for a frozen model, one file a kind (`kvasir_lab.drafters.kind`)."""
