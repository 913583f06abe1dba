"""Medusa heads (arXiv 2401.10774): residual blocks over the final normed state, one for each place ahead."""

from __future__ import annotations

from kvasir_lab.drafters.head_kind import HeadKind


class TrainedMedusa(HeadKind):
    title = "Medusa heads (arXiv 2401.10774)"
