"""Give an I-DLM adapter the size of a widened model: `kvasir_lab/studies/widen_idlm.py ADAPTER MODEL OUT --size 8b`.

MODEL is the small model that ADAPTER was trained for, and OUT goes with what `kvasir_lab/studies/widen_checkpoint.py
MODEL` writes at the same size (without --spread): drafts are those of the small model, and a mask row costs what it
does in a large one. Layers that hold nothing of the small model have random A and zero B, so that they are computed and
add nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import load_file, save_file

from kvasir.models.checkpoint import resolve
from kvasir.models.fill import read_tensor
from kvasir.models.loader import read_headers
from kvasir.speculation.heads import fingerprint
from kvasir_lab.drafters.gated_adapter import PARTS, WEIGHTS
from kvasir_lab.studies.widen_checkpoint import SIZES, SPREAD, Size, Widened, wider_config
from kvasir_lab.study import Report, study


def widen(adapter: Path, model: Path, out: Path, size: Size, seed: int = 0) -> None:
    """Write the widened adapter's folder. Raises ConfigError for a model that cannot be widened."""
    config = json.loads((model / "config.json").read_text())
    wide_config, told = wider_config(config, size), json.loads((adapter / "config.json").read_text())
    small = {stored.name: read_tensor(stored) for stored in read_headers(model)}
    wide = Widened(small, config, size, torch.device("cpu"), seed)
    norm = wide._norm("model.norm.weight")
    heads, kv = size.heads * wide.head_dim, size.kv_heads * wide.head_dim
    first = torch.arange
    # By matrix: inputs and outputs of the large one, and where those of the small one lie.
    places = {
        "self_attn.q_proj": (size.hidden, heads, first(wide.hidden), wide.query_rows),
        "self_attn.k_proj": (size.hidden, kv, first(wide.hidden), None),
        "self_attn.v_proj": (size.hidden, kv, first(wide.hidden), None),
        "self_attn.o_proj": (heads, size.hidden, wide.query_rows, first(wide.hidden)),
        "mlp.gate_proj": (size.hidden, size.ffn, first(wide.hidden), first(wide.ffn)),
        "mlp.up_proj": (size.hidden, size.ffn, first(wide.hidden), first(wide.ffn)),
        "mlp.down_proj": (size.ffn, size.hidden, first(wide.ffn), first(wide.hidden)),
    }
    stored, generator = load_file(adapter / WEIGHTS), torch.Generator().manual_seed(seed)
    mask = torch.zeros(size.hidden, dtype=torch.bfloat16)
    mask[: wide.hidden] = stored["mask_embedding"]
    made = {"mask_embedding": mask}
    for i in range(size.layers):
        for part in PARTS:
            inputs, outputs, columns, rows = places[part]
            name = f"base_model.model.model.layers.{i}.{part}"
            a = torch.randn(told["rank"], inputs, generator=generator).mul_(SPREAD).bfloat16()
            b = torch.zeros(outputs, told["rank"], dtype=torch.bfloat16)
            if f"{name}.lora_A.weight" in stored:
                own = stored[f"{name}.lora_B.weight"]
                a[:, columns] = stored[f"{name}.lora_A.weight"]
                b[first(len(own)) if rows is None else rows] = own
            if part in ("self_attn.o_proj", "mlp.down_proj") and f"{name}.lora_A.weight" in stored:
                # Heads and channels that the small model lacks hold noise, which its adapter must not read.
                a.zero_()[:, columns] = stored[f"{name}.lora_A.weight"]
            made |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    out.mkdir(parents=True, exist_ok=True)
    save_file(made, out / WEIGHTS)
    told["target"] = told["target"] | {
        "name": f"{told['target']['name']}-wide",
        "hidden_size": size.hidden,
        "num_layers": wide_config["num_hidden_layers"],
        "weights": fingerprint(norm),
    }
    (out / "config.json").write_text(json.dumps(told, indent=1) + "\n")


@study()
def main(
    report: Report,
    adapter: Annotated[Path, "folder that `kvasir train drafter idlm` wrote"],
    model: Annotated[str, "the small model: a folder, or a name such as base"],
    output: Annotated[Path, "folder to write"],
    *,
    size: Annotated[str, SIZES] = "8b",
) -> None:
    widen(adapter, resolve(model), output, SIZES[size])
