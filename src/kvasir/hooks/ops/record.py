"""Copy the states of rows by their position, to fit probes and directions; changes nothing. Exact; T D bytes a row.

No tensors. One request at a time records: a later one at the same position overwrites. ``HookSlots.recorded`` gives
what was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvasir.hooks.hook import Op, Steer


class Record(Op):
    exact = True
    affects_kv = False
    records = True

    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer | None:
        return None
