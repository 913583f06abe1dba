"""Test-time scaling: spend more inference on a problem for a better or cheaper answer.

A thin layer above any endpoint: `endpoint.py` what a model must offer · `primitives.py` sample, score, choose, compare,
`Seq` · `ledger.py` costs and budgets · `journal.py` resume a killed run · `strategy.py` and `strategies/` the methods ·
`solve.py` many problems at once.
"""
