"""EAGLE-3 as its authors, SpecForge and NVIDIA publish it: one config.json, ``midlayer`` or ``layers.0``.

`arXiv 2503.01840`; the reduced vocabulary is ``d2t`` and ``t2d``. The config's own list of hidden states is counted as
vLLM counts it: number n is what layer n reads. The list inside ``eagle_config`` is counted as its trainers (Model
Optimizer, SpecForge) count it: number n is what layer n writes.
"""

from __future__ import annotations

from kvasir.models.fields import Fields
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.published.eagle3_plan import eagle3_plan
from kvasir.speculation.published.folder import Folder, Layout, Plan
from kvasir.speculation.published.layer import DEPTH

LAYERS = "eagle_aux_hidden_state_layer_ids"


class Eagle3(Layout):
    order = 2

    def takes(self, folder: Folder) -> bool:
        config = folder.config
        architectures = config.get("architectures")
        named = isinstance(architectures, list) and any("eagle3" in str(name).lower() for name in architectures)
        reduced = any(config.get(name) for name in ("draft_vocab_size", "truncated_vocab_size"))
        return named or reduced or any(name.endswith(".hidden_norm.weight") for name in folder.shapes)

    def plan(self, folder: Folder, model: ServedModel) -> Plan:
        fields = Fields(folder.config)
        inner = fields.section("eagle_config") or Fields({})
        if not inner.flag("use_aux_hidden_state", True):
            raise folder.fail("eagle_config.use_aux_hidden_state is false, and heads over three layers are served")
        counted = fields.numbers(LAYERS, ())
        if not counted:
            counted = tuple(n + 1 for n in inner.numbers(LAYERS, ()))
        return eagle3_plan(
            folder,
            model,
            fields,
            fields,
            counted or None,
            depth=DEPTH,
            norm_first=fields.flag("norm_before_residual", False),
            norm_output=fields.flag("norm_output", False),
        )
