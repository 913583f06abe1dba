"""Loading of a decoder's weights. All tensors are checked before one is read; ``fill.py`` then reads them into place.

Fused weights are filled slice by slice, so loading needs little more memory than the model.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.layers.weight_format import MATRIX, PLAIN
from kvasir.layers.weights import NUMBERS, Placement, Slot
from kvasir.logs import log
from kvasir.models import advice, checkpoint, cost
from kvasir.models.checkpoint import read_json
from kvasir.models.collected import open_slots, to_fill
from kvasir.models.decoder import Decoder
from kvasir.models.families import build_spec, find_family
from kvasir.models.fill import DTYPES, Filling, Stored, list_names, read_tensor
from kvasir.models.formats import Formats, Quantising
from kvasir.models.gguf_file import headers
from kvasir.models.gguf_folder import LINK
from kvasir.models.mtp_fields import WEIGHT, names_of
from kvasir.models.packed import chunks_of, is_packed, stored_as
from kvasir.models.quantisation import Reader, reader_of
from kvasir.models.random_weights import draw_random
from kvasir.models.slot_views import EMBED, HEAD, prefix_left_out, read_mtp, renamed, view_of_slots
from kvasir.models.spec import ModelSpec
from kvasir.models.stored import View, uneven
from kvasir.models.token_rounding import choose_rounding
from kvasir.types import Pooling

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Largest header of a safetensors file, as the format says.
MAX_HEADER_BYTES = 100_000_000
# Most names listed in a message.
SHOWN = 5
AUTO = "auto"


def load_model(path: Path, config: dict[str, Any], **options: Any) -> Decoder:
    """Build and load a model; see ``start_loading`` for the options. Raises ConfigError."""
    decoder, filling = start_loading(path, config, **options)
    filling.wait()
    return decoder


def start_loading(
    path: Path,
    config: dict[str, Any],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: str = "auto",
    exact: bool = False,
    fused: bool = True,
    seed: int = 0,
    num_positions: int | None = None,
    pooling: Pooling | None = None,
    weights: str = AUTO,
    activations: str = AUTO,
    token_rounding: str = "off",
    mtp: bool = False,
) -> tuple[Decoder, Filling]:
    """Build the model that ``config`` describes and start to fill it from ``path`` (``dummy``: with random weights).

    The decoder may run at once, on undefined weights, to compile kernels and measure memory while files are read.
    ``num_positions`` limits the RoPE tables (default: all that the config allows). ``pooling``: how the model pools
    (None: it generates). ``weights``: the format of plain matrices, which are quantised as they are loaded (auto: as
    stored). ``activations``: their type in products of many rows with quantised weights (auto: what the checkpoint was
    made for). ``mtp``: load the layer that predicts a further token, too. Raises ConfigError that names file and
    tensor.
    """
    spec = build_spec(config)
    if pooling is not None and pooling.tokens is None:  # no token's logit is wanted
        spec = replace(spec, labels=pooling.labels)
    if num_positions and num_positions > spec.max_position:  # before tables of that size are made
        raise ConfigError(
            f"max_model_len={num_positions} is more than the {spec.max_position} positions of this model "
            "(max_position_embeddings in config.json, or what linear or yarn scaling of RoPE makes of it)."
        )
    reader = reader_of(config)
    rounding = choose_rounding(token_rounding, spec, exact)
    place = Placement(torch.device(device), dtype, exact, fused, rounding=rounding)
    place = replace(place, activations=_activations(activations, reader, place))
    filling = Filling(place.device)
    stored = [] if load_format == "dummy" else read_headers(path)
    spec = read_mtp(spec, stored) if mtp else spec
    if load_format == "dummy":
        place = replace(place, formats=choose_formats((), spec, reader, weights))
        decoder = Decoder(spec, place, num_positions)
        fill_random(decoder, seed, str(config.get("dtype") or config.get("torch_dtype")).endswith("bfloat16"))
        return decoder, filling
    place = replace(place, formats=choose_formats(stored, spec, reader, weights))
    assigned = assign(stored, spec, place)
    for prefix, tensors in assigned.left_out.items():
        size = sum(t.num_bytes for t in tensors) / (1 << 20)
        log.info("left out of %s: %s* (%d tensors, %.1f MiB)", path.name, prefix, len(tensors), size)
    decoder = Decoder(spec, place, num_positions)
    slots = slots_to_fill(decoder)
    filling.start(assigned.into(slots, place), _checks(assigned, slots, reader))
    if place.formats is not None and place.formats.quantises:  # its scratch memory is not part of a step's
        filling.wait()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return decoder, filling


def _checks(assigned: Assigned, slots: dict[str, Slot], reader: Reader | None) -> list[Callable[[], None]]:
    """Checks of numbers that fill no slot, to be done while others are filled."""
    sources = {slot: tensor for slot, tensor, _ in assigned.placed}
    checks = [partial(_check_tied, tensor, sources[EMBED]) for slot, tensor in sources.items() if slot not in slots]
    if reader is not None:
        ends = (*reader.unread, *reader.zeros)
        unread = (t for ts in assigned.left_out.values() for t in ts if t.name.endswith(ends))
        checks += [partial(reader.check, tensor) for tensor in unread]
    return checks


def brings_mtp(path: Path) -> bool:
    """Whether a checkpoint folder stores an MTP layer that its family reads. Raises ConfigError where the folder cannot
    be read."""
    spec, stored = build_spec(checkpoint.read_config(path)), read_headers(path)
    family = find_family(spec.family)
    names = names_of(family, len(spec.layers))
    prefixes = getattr(family, "RENAMED", {})
    return names is not None and any(renamed(t.name, prefixes) == names.proj + WEIGHT for t in stored)


def load_again(decoder: Decoder, path: Path) -> None:
    """Load other weights of the same model into the same tensors. Raises ConfigError that names file and tensor."""
    assigned = assign(read_headers(path), decoder.spec, decoder.place)
    Filling(decoder.place.device).start(assigned.into(slots_to_fill(decoder), decoder.place), []).wait()


# ----------------------------------------------------------------------------------------------------------- headers


def read_headers(path: Path) -> list[Stored]:
    """Headers of all tensors of a checkpoint folder: one file or the shards of its index, plain or packed, or GGUF."""
    if (path / LINK).is_file():
        return headers((path / LINK).resolve(), read_json(path / "config.json")["quantization_config"]["paired"])
    single, shards = stored_as(path / SINGLE), _weight_map(path) if (path / INDEX).is_file() else {}
    # transformers leaves an old index when it saves one file over shards, and an old file when it saves shards over it.
    if shards and (not single or any(stored_as(path / shard) for shard in shards.values())):
        if single and SINGLE not in shards.values():
            log.warning("%s holds both %s and shards: the shards that %s names are read", path, SINGLE, INDEX)
        return _read_index(path, shards)
    if single:
        return read_header(single)
    other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    hint = f"; it holds {', '.join(other[:SHOWN])}, which is not served. {advice.convert(path, other)}" if other else ""
    raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}{hint}")


def _weight_map(path: Path) -> dict[str, str]:
    """The shard of each tensor, as the index says. Raises ConfigError."""
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ConfigError(f"{path / INDEX}: weight_map is missing or not an object of tensor names to file names")
    for shard in weight_map.values():
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise ConfigError(
                f"{path / INDEX}: shard '{shard}' is not a plain file name; an index may not point outside its folder"
            )
    return weight_map


def _read_index(path: Path, weight_map: dict[str, str]) -> list[Stored]:
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if (file := stored_as(path / shard)) is None:
            missing = [name for name, file in weight_map.items() if file == shard]
            raise ConfigError(f"{path}: shard {shard} is missing ({list_names(missing)})")
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise ConfigError(
                    f"tensor '{tensor.name}' is in two shards, {tensors[tensor.name].file.name} and {file.name}"
                )
            tensors[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != stored_as(path / shard):
            raise ConfigError(f"{path / shard} does not hold tensor '{name}', which {INDEX} says it does")
    return list(tensors.values())


def read_header(file: Path) -> list[Stored]:
    """Read the header of a safetensors file, packed or not, and check its layout.

    There may be no gap, no overlap and nothing past the end of the file.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = struct.unpack("<Q", head)[0] if len(head := f.read(8)) == 8 else None
        if length is None or length > min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{file} is truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{file}: its header is not valid JSON: {e}") from e
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: its header is not a JSON object")
    header.pop("__metadata__", None)
    stored, ends = [], []
    for name, entry in header.items():
        tensor, begin, end = _entry(file, name, entry, 8 + length)
        if 8 + length + end > size:
            raise ConfigError(f"{file} is truncated: tensor '{name}' ends at byte {8 + length + end} of {size}")
        stored.append(tensor)
        ends.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(ends):
        if begin != at:
            raise ConfigError(
                f"{file}: tensor '{name}' begins at byte {begin} of the data, expected {at} (a gap or an overlap)"
            )
        at = end
    if 8 + length + at != size:
        raise ConfigError(f"{file} is {size - 8 - length - at} bytes longer than its tensors: it is damaged")
    return stored


def _entry(file: Path, name: str, entry: Any, data: int) -> tuple[Stored, int, int]:
    """Check one entry of a header. Returns the tensor, and where its bytes begin and end, counted from ``data``, the
    place of the file's first byte of data."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as e:
        raise ConfigError(f"{file}: the header entry of tensor '{name}' is damaged") from e
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ConfigError(
            f"{file}: the header entry of tensor '{name}' has a shape or offset that is not a whole number"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"{file}: tensor '{name}' has dtype {dtype}; served are {', '.join(NUMBERS)}")
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if is_packed(file) and "high" in entry:
        try:
            chunks, size = chunks_of(entry, shape, data + begin)
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{file}: the header entry of tensor '{name}' is damaged ({e})") from e
        if dtype != "BF16" or end - begin != size:
            raise ConfigError(
                f"{file}: tensor '{name}' is packed in {size} bytes, its entry gives {end - begin} of {dtype}"
            )
        return Stored(name, file, dtype, shape, num_bytes, data + begin, chunks), begin, end
    if end - begin != num_bytes:
        raise ConfigError(
            f"{file}: tensor '{name}' of shape {list(shape)} and dtype {dtype} needs {num_bytes} bytes, its entry "
            f"gives {end - begin}"
        )
    return Stored(name, file, dtype, shape, num_bytes, data + begin), begin, end


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder, one by one. Raises ConfigError for a damaged or missing file."""
    for tensor in read_headers(path):
        try:
            yield tensor.name, read_tensor(tensor)
        except OSError as e:
            raise ConfigError(f"{tensor.file} cannot be read: {e}") from e


# ------------------------------------------------------------------------------------------------------------ slots


@dataclass(frozen=True)
class Assigned:
    """Slots by name with the tensors that fill them and the part of each; and what the family leaves out, by prefix.
    ``formats``: those of quantised matrices; ``opened``: the planes of those that fill plain slots, by name."""

    placed: list[tuple[str, Stored, View]]
    left_out: dict[str, list[Stored]]
    formats: Formats | Quantising | None = None
    opened: dict[str, dict[str, Stored]] = field(default_factory=dict)

    def into(self, slots: dict[str, Slot], place: Placement) -> list[tuple[Stored, Slot]]:
        """The slots to fill. A tied head that is stored as well is not among them."""
        found: list[tuple[Stored, Slot]] = []
        for planes in self.opened.values():
            matrix = planes[MATRIX]
            targets = [(view, slots[name]) for name, tensor, view in self.placed if tensor is matrix]
            found += open_slots(planes, self.formats.format_of(matrix), self.formats.reader, targets, place)
        opened = {id(planes[MATRIX]) for planes in self.opened.values()}
        for name, tensor, view in self.placed:
            if name in slots and id(tensor) not in opened:
                tensor, slot = _fitted(self.formats, name, tensor, slots[name])
                found.append((tensor, slot.through(view.index, view.transposed)))
        return found


def choose_formats(
    stored: Sequence[Stored], spec: ModelSpec, reader: Reader | None, weights: str = AUTO
) -> Formats | Quantising | None:
    """The formats of a model's matrices; None: all are plain. ``stored``: the checkpoint's tensors, none: only
    config.json is known. ``weights``: the format of plain matrices, or of all where nothing is stored. Raises
    ConfigError where they are quantised."""
    if reader is None:
        return None if weights in (AUTO, PLAIN) else Quantising(weights)
    if weights == PLAIN and not stored:  # nothing is read: a shape alone
        return None
    if weights.replace("-", "_") not in (AUTO, reader.name):
        raise ConfigError(
            f"weights={weights}, but the checkpoint is quantised already (quant_method '{reader.name}'). Leave "
            "--weights out, or give the unquantised checkpoint."
        )
    prefixes = getattr(find_family(spec.family), "RENAMED", {})
    return Formats(reader, view_of_slots(stored, spec), {renamed(t.name, prefixes): t for t in stored})


def _activations(given: str, reader: Reader | None, place: Placement) -> str:
    """The type of activations in products of many rows with quantised weights. Raises ConfigError."""
    if given == "fp8" and place.exact:
        raise ConfigError("activation_dtype=fp8 cannot be had in exact mode, which has one kind of product: use bf16")
    if given == "fp8" and place.device.type == "cpu":
        raise ConfigError("activation_dtype=fp8 needs a GPU. On a CPU leave out --activation-dtype.")
    if given != AUTO:
        return given
    return "bf16" if reader is None or place.exact or place.device.type == "cpu" else reader.activations


def _fitted(formats: Formats | Quantising | None, name: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
    return (tensor, slot) if formats is None else formats.fit(name, tensor, slot)


def weight_bytes(config: dict[str, Any], dtype: torch.dtype, weights: str = AUTO) -> int:
    """Bytes that a model's weights take on a device, by its config.json alone. Raises ConfigError."""
    decoder = _without_memory(config, dtype, weights)
    elements = sum(w.num_outputs * w.num_inputs * (w.count or 1) for w in decoder.weights())
    saved = elements * dtype.itemsize - sum(w.num_bytes for w in decoder.weights())
    return cost.weight_bytes(decoder.spec, dtype.itemsize) - saved


def element_bytes(config: dict[str, Any], dtype: torch.dtype, weights: str = AUTO) -> float:
    """Average bytes of an element of a model's matrices on a device, by its config.json alone. Raises ConfigError."""
    return _without_memory(config, dtype, weights).weight_bytes


def _without_memory(config: dict[str, Any], dtype: torch.dtype, weights: str) -> Decoder:
    spec = build_spec(config)
    formats = choose_formats((), spec, reader_of(config), weights)
    return Decoder(spec, Placement(torch.device("meta"), dtype, formats=formats), num_positions=1)


def check_weights(path: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError unless a folder's tensors fit ``config``."""
    stored, spec = read_headers(path), build_spec(config)
    formats = choose_formats(stored, spec, reader_of(config))
    assign(stored, spec, Placement(torch.device("meta"), torch.float32, formats=formats))


def slots_to_fill(decoder: Decoder) -> dict[str, Slot]:
    """The slots that a checkpoint's tensors fill."""
    formats = decoder.place.formats
    quantises = formats is not None and formats.quantises
    return to_fill(decoder.slots(), decoder.place.dtype) if quantises else decoder.slots()


def assign(stored: list[Stored], spec: ModelSpec, place: Placement | None = None) -> Assigned:
    """Find the tensor and the part of it for every slot. Raises ConfigError for missing and unexpected tensors, wrong
    shapes, and elements that nobody reads.

    It uses a decoder without memory, so that a wrong checkpoint is refused before anything is allocated. ``place``: the
    one of the decoder that will be filled (None: of plain weights).
    """
    place = replace(place or Placement(torch.device("meta"), torch.float32), device=torch.device("meta"))
    slots = slots_to_fill(Decoder(spec, place, num_positions=1))
    family, formats = find_family(spec.family), place.formats
    view = view_of_slots(stored, spec, formats)
    views = {slot: view(slot) for slot in slots}
    tied_head = view(HEAD) if spec.tied and spec.labels is None else None
    left_out: dict[str, list[Stored]] = {}
    found: dict[str, Stored] = {}
    prefix_of = prefix_left_out(spec, family, stored)
    for tensor in stored:
        name = renamed(tensor.name, getattr(family, "RENAMED", {}))
        prefix = prefix_of(name)
        if formats is not None and formats.unread(name):
            prefix = "*." + name.rpartition(".")[2]
        if spec.labels is not None and name == view(HEAD).name:
            prefix = name  # a head for tokens is not read where labels are scored
        if prefix is not None:
            left_out.setdefault(prefix, []).append(tensor)
        elif not name.endswith(".rotary_emb.inv_freq"):  # early checkpoints hold it; it follows from the config
            found[name] = tensor
    if tied_head is not None and tied_head.name in found:
        views[HEAD], slots[HEAD] = tied_head, slots[EMBED]
    readers: dict[str, list[str]] = {}
    for slot, part in views.items():
        readers.setdefault(part.name, []).append(slot)
    opened: dict[str, dict[str, Stored]] = {}
    for name, mine in list(readers.items()) if isinstance(formats, Formats) else []:
        if name not in found or any(slot.partition("/")[0] in formats.quantised for slot in mine):
            continue
        planes = formats.opened(name, found[name], found.keys())
        readers |= {other: readers.get(other, []) for other in planes.values()}
        if planes and all(other in found for other in planes.values()):
            opened[name] = {plane: found[other] for plane, other in planes.items()}
    if isinstance(formats, Formats) and formats.reader.zeros:
        for name in [n for n in found if n not in readers and n.endswith(formats.reader.zeros)]:
            left_out.setdefault("*." + name.rpartition(".")[2], []).append(found.pop(name))
    missing = [name for name in readers if name not in found]
    unexpected = [tensor.name for name, tensor in found.items() if name not in readers]
    if missing or unexpected:
        problems = [
            f"{what}: {list_names(names)}"
            for what, names in (("missing tensors", missing), ("unexpected tensors", unexpected))
            if names
        ]
        raise ConfigError(
            f"the weights do not fit config.json ({spec.family}, {len(spec.layers)} layers): {'; '.join(problems)}"
            + ("" if spec.mtp is None else ". If they are the MTP layer's, leave out --drafter mtp")
        )
    for name, mine in readers.items():
        fitted = [_fitted(formats, slot, found[name], slots[slot]) for slot in mine]
        if name in opened:
            fitted = [(tensor, replace(slot, types=(tensor.dtype,))) for tensor, slot in fitted]
        if mine:
            _check_reads(fitted[0][0], {slot: (views[slot], one) for slot, (_, one) in zip(mine, fitted)})
    return Assigned([(slot, found[view.name], view) for slot, view in views.items()], left_out, formats, opened)


def _check_reads(tensor: Stored, views: dict[str, tuple[View, Slot]]) -> None:
    """Raise ConfigError unless the views have the shapes of their slots and together read every element once."""
    where = f"{tensor.file}: tensor '{tensor.name}'"
    for slot, (view, place) in views.items():
        if tensor.dtype not in place.types:
            raise ConfigError(f"{where} has dtype {tensor.dtype}; served are {', '.join(place.types)}")
        shape = tuple(place.shape)
        if view.shape(tensor.shape) != shape:
            part = f" for its part '{slot}'" if view.index else ""
            expected = [*shape[:-2], shape[-1], shape[-2]] if view.transposed else [*shape]
            raise ConfigError(f"{where} has shape {list(tensor.shape)}, config.json asks for {expected}{part}")
    if not tensor.shape or len(views) == 1 and not view.index:
        return
    wrong = uneven(tensor.shape, tuple(view.picks(tensor.shape) for view, _ in views.values()))
    if wrong is not None:
        at, several = wrong
        raise ConfigError(
            f"{where} of shape {list(tensor.shape)}: element {list(at)} is read by "
            f"{'several slots' if several else 'nobody'}. The checkpoint does not fit config.json."
        )


# ---------------------------------------------------------------------------------------------------------- filling


def _check_tied(head: Stored, embedding: Stored) -> None:
    """Raise ConfigError when the stored head of a tied model differs from the embedding."""
    if not torch.equal(read_tensor(head), read_tensor(embedding)):
        raise ConfigError(
            f"{head.file}: tie_word_embeddings is true, but '{head.name}' differs from the embedding. "
            "Set tie_word_embeddings to false in config.json."
        )


@torch.inference_mode()
def fill_random(decoder: Decoder, seed: int, narrow: bool = False) -> None:
    """Fill a decoder with random weights, made on the device.

    Matrices are uniform with variance 1 / inputs, so that activations stay of order one; norms are one, other vectors
    zero. ``narrow``: round to bf16, whatever type holds the weights, as a checkpoint in bf16 has them.
    """
    draw_random(decoder.slots(), torch.Generator(decoder.place.device).manual_seed(seed), narrow)
