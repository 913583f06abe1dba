"""Evaluation: run tasks through the engine or plain torch, and turn the outcomes into figures and intervals."""
