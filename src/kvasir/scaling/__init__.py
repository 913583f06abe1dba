"""Test-time scaling: more inference for a better or a cheaper answer, as one thin layer above any endpoint.

`endpoint.py` what a model must offer · `primitives.py` sample, score, choose, compare, `Seq` · `ledger.py` what it cost ·
`journal.py` so that a killed run goes on · `strategy.py` and `strategies/` the methods · `solve.py` many problems at once.
"""
