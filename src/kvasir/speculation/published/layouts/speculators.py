"""The format of the `speculators` library: ``speculators_model_type``, and the layer's config inside
``transformer_layer_config``. EAGLE-3 heads, and EAGLE-1 heads without its further norms.

Hidden states are counted as vLLM counts them: number n is what layer n reads.
"""

from __future__ import annotations

from kvasir.models.fields import Fields
from kvasir.speculation.drafter import ServedModel
from kvasir.speculation.published.eagle3_plan import eagle3_plan
from kvasir.speculation.published.folder import Folder, Layout, Plan
from kvasir.speculation.published.head import Eagle1Head, PublishedShape
from kvasir.speculation.published.layer import DEPTH, NOT_OURS, check_size, layer_shape, layer_sources

KIND = "speculators_model_type"


class Speculators(Layout):
    order = 1

    def takes(self, folder: Folder) -> bool:
        return bool(folder.config.get(KIND))

    def plan(self, folder: Folder, model: ServedModel) -> Plan:
        own = Fields(folder.config)
        kind = own.text(KIND)
        layer = own.section("transformer_layer_config")
        if layer is None:
            raise folder.fail("config.json: transformer_layer_config is missing")
        method = own.section("speculators_config") or Fields({})
        verifier = (method.section("verifier") or Fields({})).text("name_or_path", "")
        if kind == "eagle3":
            return eagle3_plan(
                folder,
                model,
                layer,
                own,
                own.numbers("eagle_aux_hidden_state_layer_ids", ()) or None,
                depth=_depth(method),
                norm_first=own.flag("norm_before_residual", True),
                norm_output=own.flag("norm_output", False),
                verifier=verifier,
            )
        if kind == "eagle":
            return _eagle1(folder, model, layer, own, _depth(method), verifier)
        raise folder.fail(f"it holds a drafter of the kind '{kind}', and eagle reads 'eagle' and 'eagle3'")


def _eagle1(folder: Folder, model: ServedModel, layer: Fields, own: Fields, depth: int, verifier: str) -> Plan:
    if own.flag("layernorms", False):
        raise folder.fail("layernorms is true, and EAGLE-1 heads without these norms are served")
    prefix = "transformer."
    shape = layer_shape(folder, layer, prefix)
    shape["biases"] |= {"fc"} if "fusion_fc.bias" in folder.shapes else set()
    sources = {"fuse_proj.weight": ("fusion_fc.weight",), "fuse_proj.bias": ("fusion_fc.bias",)}
    served = check_size(folder, shape["dim"], model)
    made = PublishedShape(**shape, served_dim=served, layers=(len(model.spec.layers) - 1,), depth=depth)
    ignored = (*NOT_OURS, "embed_tokens.", "lm_head.", f"{prefix}self_attn.rotary_emb.")
    return Plan(Eagle1Head, made, layer_sources(prefix) | sources, ignored, verifier)


def _depth(method: Fields) -> int:
    """Tokens of a chain, as the first proposal method says."""
    methods = method.raw.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return Fields(first, "proposal_methods.").integer("speculative_tokens", DEPTH)
