"""A head of EAGLE-3's type (arXiv 2503.01840): one decoder layer over three layers' states, unrolled on its own."""

from __future__ import annotations

from kvasir_lab.drafters.head_kind import HeadKind


class TrainedEagle(HeadKind):
    title = "EAGLE-3-type head (arXiv 2503.01840)"
