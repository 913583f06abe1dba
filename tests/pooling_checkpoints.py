"""Tiny random embedding models and rerankers in the layouts that people publish, and transformers' answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import checkpoints

TYPES = "sentence_transformers.models."


def embedding(
    folder: Path,
    *,
    rows: str | None = "lasttoken",
    normalize: bool = True,
    headless: bool = True,
    prompts: dict[str, str] | None = None,
    variant: str = "qwen3",
    **changes: Any,
) -> Path:
    """Write a folder as sentence-transformers does; ``rows``: the pooling mode (None: no modules). ``headless``:
    tensors without the prefix ``model.`` under the generating architecture's name, as Qwen3-Embedding has them."""
    checkpoints.write(folder, variant, **changes)
    if headless:
        import transformers

        config = json.loads((folder / "config.json").read_text())
        transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
        if rows is not None:
            (folder / "config.json").write_text(json.dumps(config))
    if rows is not None:
        add_modules(folder, rows, normalize)
    if prompts is not None:
        known = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(known))
    return folder


def add_modules(folder: Path, rows: str, normalize: bool) -> None:
    """Write modules.json and the config of the pooling module."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + ([("2_Normalize", "Normalize")] if normalize else [])
    listed = [{"idx": i, "name": str(i), "path": path, "type": TYPES + kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling: dict[str, Any] = {f"pooling_mode_{mode}": mode == rows for mode in modes}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **pooling, "include_prompt": True})
    )


def classifier(folder: Path, labels: int = 1, **changes: Any) -> Path:
    """Write a reranker with a head for ``labels`` classes."""
    import torch
    import transformers

    checkpoints.write(folder, "qwen3", **changes)
    model = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=labels)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(folder)
    return folder


def states(folder: Path, ids: list[int]) -> Any:
    """Hidden states [T, E] after the final norm, as transformers computes them."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0].clone()
