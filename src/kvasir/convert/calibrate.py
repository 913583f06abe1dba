"""Calibration: texts run through the engine's own decoder a layer at a time, and sums over what a converter asks for.

Every layer reads what the converted layers before it give, because the converted model will (`Layers.replace`).
Sequences are packed without padding, so no sum holds a row that is no token. Sums are in fp64 and not centred.

Legend: T rows, E model dim, H query heads, G KV heads, D head dim, N outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvasir import technique
from kvasir.attention.backend import BACKENDS, AttentionBackend, Site
from kvasir.engine.ways.batch import pack
from kvasir.errors import ConfigError
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.norm import Stream
from kvasir.layers.rope import Angles, RopeTable
from kvasir.layers.spec import GQASpec
from kvasir.models.decoder import Decoder
from kvasir.models.families import find_family
from kvasir.models.loader import load_model
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.models.stored import view_of
from kvasir.plain_files import refuse_special
from kvasir.types import Request, SamplingParams, Span
from kvasir.types import Sequence as Seq

# Sites for a converter. kv: keys after their norm, and values, side by side; q: queries after their norm, by
# head; input: what the projections of a layer read, after its first norm.
SITES = ("kv", "q", "input")
# Texts of a calibration and tokens of each, as in TransMLA's code.
NUM_TEXTS, TEXT_TOKENS = 128, 256
# Rows of a batch: sums of a batch are one product each, and states of more rows would not fit beside a large model.
BATCH_ROWS = 4096
PAGE_SLOTS = 16


@dataclass(frozen=True)
class Texts:
    """Token ids of the texts that sums are made of, and of others that measure a result. ``digest``: names both."""

    calibration: list[list[int]]
    held_out: list[list[int]]
    digest: str


@dataclass
class Sums:
    """Sums over ``rows`` tokens of one layer, fp64. ``kv``: Gram of keys and values [2 G D, 2 G D]; ``q``: of each
    query head [H, D, D]; ``input``: of the block's input [E, E]; None: not asked for."""

    rows: int = 0
    kv: torch.Tensor | None = None
    q: torch.Tensor | None = None
    input: torch.Tensor | None = None

    def add(self, name: str, value: torch.Tensor) -> None:
        old = getattr(self, name)
        setattr(self, name, value if old is None else old + value)


class _Part:
    """One batch of whole texts, and the residual stream of its rows."""

    def __init__(self, decoder: Decoder, texts: Sequence[Sequence[int]]) -> None:
        device, spans, page = decoder.place.device, [], 1
        for i, ids in enumerate(texts):
            request = Request(id=str(i), prompt_ids=list(ids), params=SamplingParams(), seed=0, max_tokens=1)
            seq, pages = Seq(request), -(-len(ids) // PAGE_SLOTS)
            seq.tables = [list(range(page, page + pages))]
            page += pages
            spans.append(Span(seq, 0, len(ids)))
        self.num_pages = page
        self.batch = pack(spans, PAGE_SLOTS, device, 1)
        self.ends = torch.tensor([len(ids) for ids in texts], device=device).cumsum(0)
        self.restart(decoder)

    def restart(self, decoder: Decoder) -> None:
        """Begin again at the embeddings."""
        with torch.inference_mode():
            self.h_TE = decoder.embed(self.batch.input_ids)


class Layers:
    """A decoder whose layers are run, and may be replaced, one after the other over some texts.

    Raises ConfigError for a model that layers alone do not describe.
    """

    def __init__(
        self, decoder: Decoder, texts: Sequence[Sequence[int]], told: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        spec = decoder.spec
        if spec.layer_embedding is not None or any(layer.cache_of is not None for layer in spec.layers):
            raise ConfigError(
                f"models of '{spec.family}' share caches or embeddings between layers, and calibration runs every "
                "layer alone; it takes models without them"
            )
        self.decoder, self.specs = decoder, list(spec.layers)
        self.parts = [_Part(decoder, part) for part in _batches(texts)]
        longest = max(len(ids) for ids in texts)
        self.tables: dict[Any, RopeTable] = {}
        self.codecs: dict[int, Codec] = {}  # of layers whose keys and values are not cached as they are
        self.longest, self.told = longest, told

    def restart(self) -> None:
        """Go back to the embeddings, with the layers as they are now."""
        for part in self.parts:
            part.restart(self.decoder)

    @torch.inference_mode()
    def sums(self, index: int, sites: Sequence[str]) -> Sums:
        """Sums over all texts at ``sites`` of layer ``index``, whose inputs are the streams as they are now."""
        assert set(sites) <= set(SITES), f"sites are {', '.join(SITES)}"
        found = Sums()
        block, spec = self.decoder.blocks[index], self.specs[index].mixer
        if not isinstance(spec, GQASpec):
            raise ConfigError(f"layer {index} has a mixer of kind '{spec.kind}', which has no keys and values by head")
        for part in self.parts:
            x_TE = part.h_TE if block.mixer_norm is None else block.mixer_norm(part.h_TE.clone())
            found.rows += len(x_TE)
            if "input" in sites:
                found.add("input", x_TE.double().T @ x_TE.double())
            if "kv" not in sites and "q" not in sites:
                continue
            heads_TXD = block.mixer.qkv(x_TE, None).view(len(x_TE), -1, spec.head_dim)
            qk, v_TGD = heads_TXD.split_with_sizes(block.mixer.split, 1)
            if block.mixer.qk_norm is not None:
                qk = block.mixer.qk_norm(qk.contiguous())
            q_THD, k_TGD = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), 1)
            if "kv" in sites:
                kv_TN = torch.cat((k_TGD.flatten(1), v_TGD.flatten(1)), 1).double()
                found.add("kv", kv_TN.T @ kv_TN)
            if "q" in sites:
                q_HTD = q_THD.transpose(0, 1).double()
                found.add("q", q_HTD.mT @ q_HTD)
        return found

    @torch.inference_mode()
    def advance(self, index: int) -> None:
        """Run layer ``index`` over all texts, so that the streams are the next layer's inputs."""
        for part in self.parts:
            part.h_TE = self._run(index, part)
        self.told(index + 1, len(self.specs))

    def _run(self, index: int, part: _Part) -> torch.Tensor:
        decoder, layer = self.decoder, self.specs[index]
        one = replace(decoder.spec, layers=(layer,))
        dtype, device = decoder.place.dtype, decoder.place.device
        codec = self.codecs.get(index) or technique.load(CODECS, "plain", Codec)
        pool = KVPool(one.cache_groups(), codec, [part.num_pages], PAGE_SLOTS, device, dtype)
        backend = technique.load(BACKENDS, "torch", AttentionBackend)
        backend.prepare(Site(str(device), dtype, "plain", PAGE_SLOTS, tuple(one.attentions())))
        batch = replace(part.batch, scratch={})
        backend.plan(batch)
        stream = Stream(part.h_TE.clone())
        block = decoder.blocks[index]
        block.forward(stream, Angles(self.table(index), batch.positions), pool.layer(0), backend, batch)
        return stream.value()

    def table(self, index: int) -> RopeTable | None:
        """The angles of layer ``index``; None: it rotates nothing."""
        rope = self.specs[index].rope
        if rope is not None and rope not in self.tables:
            self.tables[rope] = RopeTable(rope, self.longest, self.decoder.place.device)
        return None if rope is None else self.tables[rope]

    def replace(self, index: int, layer: LayerSpec, mixer: Any) -> tuple[LayerSpec, Any]:
        """Put another mixer into layer ``index``. Returns what was there."""
        block = self.decoder.blocks[index]
        before = self.specs[index], block.mixer
        self.specs[index], block.mixer = layer, mixer
        return before

    @torch.inference_mode()
    def logits(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits [T, V] in fp32 of the rows that have a next token in their text, and that token [T]; one text a
        turn."""
        for part in self.parts:
            first = 0
            for end in part.ends.tolist():
                yield (
                    self.decoder.logits(part.h_TE[first : end - 1].clone()).float(),
                    part.batch.input_ids[first + 1 : end],
                )
                first = end

    def run(self, first: int = 0) -> None:
        """Run all layers from ``first`` on."""
        for index in range(first, len(self.specs)):
            self.advance(index)


def loss(layers: Layers) -> float:
    """Mean cross-entropy in nats of a token, after the last layer."""
    total = count = 0.0
    for logits_TV, next_T in layers.logits():
        total += float(torch.nn.functional.cross_entropy(logits_TV, next_T.long(), reduction="sum"))
        count += len(next_T)
    return total / count


def divergence(layers: Layers, teacher: Sequence[torch.Tensor]) -> float:
    """Mean KL divergence in nats of a token from the ``teacher``'s log-probabilities, one tensor [T, V] a text."""
    total, count = 0.0, 0
    for (logits_TV, _), wanted_TV in zip(layers.logits(), teacher):
        wanted_TV = wanted_TV.to(logits_TV)
        total += float((wanted_TV.exp() * (wanted_TV - logits_TV.log_softmax(-1))).sum())
        count += len(logits_TV)
    return total / count


def log_probs(layers: Layers) -> list[torch.Tensor]:
    """Log-probabilities of every text [T, V], after the last layer, on the CPU."""
    return [logits_TV.log_softmax(-1).cpu() for logits_TV, _ in layers.logits()]


def measure(layers: Layers, teacher: Sequence[torch.Tensor]) -> dict[str, float]:
    """Perplexity and KL divergence of the layers as they are now."""
    layers.restart()
    layers.run()
    return {"perplexity": math.exp(loss(layers)), "kl": divergence(layers, teacher)}


def fill(mixer: Any, index: int, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Fill a mixer's slots from stored tensors by name, as the loader would from a file."""
    family = find_family(spec.family)
    for name, slot in mixer.slots().items():
        view = view_of(family.stored(f"layers.{index}.mixer.{name}", spec))
        part = tensors[view.name][view.index] if view.index else tensors[view.name]
        slot.target.copy_((part.mT if view.transposed else part) + slot.offset)


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Texts together, as many as fit into ``BATCH_ROWS``."""
    held: list[Sequence[int]] = []
    for ids in texts:
        if held and sum(map(len, held)) + len(ids) > BATCH_ROWS:
            yield held
            held = []
        held.append(ids)
    if held:
        yield held


class Run:
    """A calibration: the source's decoder in memory, and the texts. ``told`` gets the number of each layer that ran and
    the number of layers; there are several passes over them."""

    def __init__(
        self, decoder: Decoder, texts: Texts, told: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        self.decoder, self.texts, self.told = decoder, texts, told

    @classmethod
    def open(
        cls,
        path: Path,
        config: dict[str, Any],
        file: str,
        default: Callable[[Path], Texts] | None,
        device: str,
        told: Callable[[int, int], None] = lambda done, of: None,
    ) -> Run:
        """Load the model in ``path`` and its texts: those in ``file``, or the ``default`` ones if that is empty. On a
        CPU weights are fp32, on a GPU as they are stored. Raises ConfigError."""
        if not file and default is None:
            raise ConfigError("this converter calibrates on texts, and none were given: name a file, texts=FILE")
        texts = read_texts(Path(file), path) if file or default is None else default(path)
        stored = config.get("dtype") or config.get("torch_dtype")
        wide = device == "cpu" or stored not in ("bfloat16", "float16")
        dtype = torch.float32 if wide else getattr(torch, stored)
        longest = max(map(len, (*texts.calibration, *texts.held_out)))
        return cls(load_model(path, config, device=device, dtype=dtype, num_positions=longest), texts, told)

    def layers(self, texts: Sequence[Sequence[int]] | None = None) -> Layers:
        """The decoder's layers over ``texts`` (None: those of the calibration)."""
        return Layers(self.decoder, self.texts.calibration if texts is None else texts, self.told)


def read_texts(file: Path, model: Path) -> Texts:
    """Texts of a UTF-8 file in the tokens of ``model``: NUM_TEXTS of TEXT_TOKENS and the held-out ones, or as many as
    it holds. Raises ConfigError."""
    from kvasir.models.tokenizer import Tokenizer

    refuse_special(file)
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"texts={file}: {e}") from e
    return cut_texts(Tokenizer.load(model).encode(content, add_special=False), f"texts={file}")


def cut_texts(ids: Sequence[int], where: str) -> Texts:
    """Cut tokens into texts: NUM_TEXTS to calibrate on, and after them an eighth as many to measure."""
    most = NUM_TEXTS + NUM_TEXTS // 8
    texts = [list(ids[i : i + TEXT_TOKENS]) for i in range(0, len(ids) - TEXT_TOKENS + 1, TEXT_TOKENS)][:most]
    if len(texts) < 2:
        raise ConfigError(f"{where} holds {len(ids)} tokens; calibration needs at least {2 * TEXT_TOKENS}")
    first = len(texts) - max(1, len(texts) // 9)
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=16).hexdigest()
    return Texts(texts[:first], texts[first:], digest)
