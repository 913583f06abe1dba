"""The ends of the served model, as a trainer needs them: embeddings, final norm and output matrix.

They are read from the checkpoint. A trainer therefore gets no logits, and needs no layer of the model.

Legend: M rows, E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from kvasir.layers.weights import Placement
from kvasir.models.checkpoint import read_config
from kvasir.models.decoder import Decoder
from kvasir.models.families import build_spec
from kvasir.models.fill import Filling
from kvasir.models.loader import assign, choose_formats, read_headers, slots_to_fill
from kvasir.models.quantisation import reader_of
from kvasir.speculation import heads


class Base:
    """The frozen ends of a model of any family. ``dtype``: the type in which it is served."""

    def __init__(self, decoder: Decoder, num_layers: int) -> None:
        self._decoder, self._matrix_VE = decoder, decoder.head.dequantise()
        self.device, self.dtype = decoder.place.device, decoder.place.dtype
        self.dim, self.num_layers = decoder.spec.hidden_size, num_layers
        self.norm_E, self.embed_VE = decoder.norm.weight, decoder.embed_VE
        self.facts = {
            "hidden_size": self.dim,
            "vocab_size": decoder.spec.vocab_size,
            "num_layers": num_layers,
            "weights": heads.fingerprint(self.norm_E),
        }

    @classmethod
    def read(cls, path: Path, device: torch.device, dtype: torch.dtype) -> Base:
        """Read the ends of the checkpoint in ``path``. Raises ConfigError for a folder that is not served."""
        config = read_config(path)
        spec, stored = build_spec(config), read_headers(path)
        place = Placement(device, dtype)
        place = replace(place, formats=choose_formats(stored, spec, reader_of(config)))
        assigned = assign(stored, spec, place)
        ends = Decoder(replace(spec, layers=()), place, num_positions=1)
        Filling(device).start(assigned.into(slots_to_fill(ends), place), []).wait()
        return cls(ends, len(spec.layers))

    @torch.no_grad()
    def normed(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """The final norm's output [M, E] of the last layer's."""
        return self._decoder.norm(hidden_ME)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] as the first layer reads them."""
        return self._decoder.embed(ids)

    def logits(self, normed_ME: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] in fp32 of normed states, with a gradient where these have one."""
        spec = self._decoder.spec
        found = F.linear(normed_ME.to(self.dtype), self._matrix_VE).float()
        if spec.logit_scale != 1.0:
            found = found * spec.logit_scale
        if spec.logit_softcap is not None:
            found = spec.logit_softcap * torch.tanh(found / spec.logit_softcap)
        return found

    def autocast(self) -> torch.autocast:
        """Matrix products in bf16 on a GPU, and where the model is served in 16 bits: heads that learn are in fp32."""
        enabled = self.device.type == "cuda" or self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
