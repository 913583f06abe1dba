"""Readers of quantised checkpoints, one ``quant_method`` of config.json each."""
