"""Qwen 3. Quirks: every query and key head is normalised before RoPE; head_dim is its own (128 where absent).

The rerankers of the family say yes or no. The text that they were trained on is that of Zhang et al. 2025, Qwen3
Embedding.
"""

from __future__ import annotations

from kvasir.models import fields as hf
from kvasir.models.reranker import Reranker
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.types import PairTemplate

ARCHITECTURES = ("Qwen3ForCausalLM",)
stored = hf.stored
RERANKER = Reranker(
    ("no", "yes"),
    PairTemplate(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Given a web search query, retrieve relevant passages that answer the query",
    ),
)


def build(fields: hf.Fields) -> ModelSpec:
    bias, layers = fields.flag("attention_bias", False), []
    for kind in hf.qwen_layer_types(fields):
        window = hf.window(fields) if kind == "sliding_attention" else None
        mixer = hf.attention(
            fields, kv_heads=32, head_dim=128, window=window, qk_norm=hf.norm(fields), qkv_bias=bias, o_bias=bias
        )
        layers.append(LayerSpec(mixer, hf.dense(fields), hf.rope(fields, mixer.head_dim), hf.norm(fields)))
    return hf.model(fields, layers)
