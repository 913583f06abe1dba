"""FP6-LLM (arXiv 2401.14112) as ``kvasir convert quantise:format=fp6`` writes it: planes of 4 and 2 bits and scales.

No other program writes such files: FP6-LLM's own and DeepSpeed's are quantised as they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvasir.models.quantisation import Reader, with_suffix
from kvasir.models.stored import View

ENDS = {"weight": ".weight", "high": ".weight_high", "scale": ".weight_scale"}


class FP6(Reader):
    """Serves E3M2 with a scale by channel."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if (kind := config.get("fmt", "e3m2")) != "e3m2":
            self.refuse(f"fmt '{kind}'")
        self.kept = self.modules("modules_to_not_convert")

    def format_of(self, module: str) -> str | None:
        return None if module in self.kept else self.name

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        return with_suffix(view, ENDS[plane])
