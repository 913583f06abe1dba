"""Checkpoint folders as streams: read tensors one by one, write them in shards, and convert a whole folder.

The new folder gets its name only when it is complete and fits its config.json. Until then it has a temporary name.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.convert.converter import SHARD_BYTES, Converter, Source
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models import packed as packed_file
from kvasir.models.loader import INDEX, SINGLE, check_weights, read_tensors
from kvasir.models.quantisation import reader_of

if TYPE_CHECKING:
    import torch

    from kvasir.convert.calibrate import Texts
    from kvasir.convert.converter import Tensors

RECORD = "conversion.json"


def write_tensors(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES, packed: bool = False) -> int:
    """Write a stream as model.safetensors, or as shards and their index. Returns the bytes of all tensors.

    ``packed``: write each file packed, named with ``packed.SUFFIX``; ``shard_bytes`` counts the bytes before packing.

    A shard has at most ``shard_bytes``, but at least one tensor. One shard is held in memory at a time.
    """
    from safetensors.torch import save_file

    suffix = packed_file.SUFFIX if packed else ""
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    total = size = 0

    def flush() -> None:
        file = folder / f"shard-{len(shards) + 1}.safetensors"
        if packed:
            packed_file.write(file, held)
        else:
            save_file(held, file, metadata={"format": "pt"})
        shards.append((file, list(held)))
        held.clear()

    for name, tensor in tensors:
        assert name not in seen, f"the converter gives tensor '{name}' twice"
        seen.add(name)
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        shards[0][0].rename(folder / (SINGLE + suffix))
        return total
    weight_map = {}
    for i, (file, names) in enumerate(shards, 1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file.rename(folder / (final + suffix))
        weight_map |= dict.fromkeys(names, final)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def convert(
    converter: Converter,
    spec: str,
    source: Path,
    target: Path,
    *,
    shard_bytes: int | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    texts: Callable[[Path], Texts] | None = None,
    device: str = "cpu",
    calibrated: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Convert the checkpoint in ``source`` into the new folder ``target``, tokenizer and templates included.

    ``spec`` is the converter as the user wrote it, for the record that is returned and kept in ``conversion.json``.
    ``shard_bytes`` replaces the converter's own. ``progress`` receives the bytes of each tensor read, ``calibrated``
    what `calibrate.Run` tells. ``texts`` gives a converter with calibration its default texts, in the tokens of the
    model in the folder, and ``device`` is where they run. Raises ConfigError when the source cannot be converted or the
    target cannot be written; then nothing is left behind.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name a new folder")
    checkpoint.read_config(source, converter.as_served)  # refuses what is not served
    about = Source.of(source, converter.as_served(checkpoint.read_json(source / "config.json")))
    if (reader := reader_of(about.config)) is not None:
        raise ConfigError(
            f"{source} is quantised (quant_method '{reader.name}'), and converters work on plain weights. Convert the "
            "unquantised checkpoint, and quantise the result."
        )
    converter.check(about)
    if converter.calibration:
        from kvasir.convert.calibrate import Run

        file = getattr(converter.config, "texts", "")
        converter.calibrate(about, Run.open(source, about.config, file, texts, device, calibrated))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as e:
        raise ConfigError(f"cannot write {target}: {e.strerror}") from e
    try:
        made = converter.tensors(about, _counted(read_tensors(source), progress))
        if converter.files is not None:
            weights, description = converter.files
            total = write_tensors(part, made)
            (part / SINGLE).rename(part / weights)
            _write_json(part / description, converter.edit_config(about))
        else:
            total = write_tensors(part, made, shard_bytes or converter.shard_bytes, converter.packed)
            config = converter.edit_config(about)
            _write_json(part / "config.json", config)
            check_weights(part, config)
            copy_rest(source, part)
            if converter.sidecar is not None:
                _write_json(part / checkpoint.SIDECAR, converter.sidecar)
        record = {
            "converter": spec,
            "exact": converter.exact,
            "source": source.resolve().name,
            "bytes": total,
            **converter.record,
        }
        _write_json(part / RECORD, record)
        part.chmod(0o755)
        part.replace(target)
    except OSError as e:
        raise ConfigError(f"cannot write {target}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return record


def plain_folder(path: Path) -> Path:
    """``path``, or a copy of it with plain safetensors where its weights are packed: for programs that read no others.

    The copy lies in a folder for temporary files, belongs to this user, and is made once for the same files.
    """
    packed = sorted(path.glob(f"*{packed_file.SUFFIX}"))
    if not packed:
        return path
    state = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(path.iterdir()) if f.is_file()]
    key = hashlib.blake2b(repr((str(path.resolve()), state)).encode(), digest_size=8).hexdigest()
    target = Path(tempfile.gettempdir()) / f"kvasir-{os.getuid()}-{path.name}-{key}"
    if target.is_dir() and target.stat().st_uid == os.getuid():
        return target
    part = Path(tempfile.mkdtemp(prefix=f"kvasir-{path.name}-"))
    write_tensors(part, read_tensors(path))
    for file in path.iterdir():
        if file.is_file() and file not in packed and file.name != INDEX:
            shutil.copyfile(file, part / file.name)
    try:
        part.rename(target)
    except OSError:  # another process was quicker, or the name belongs to somebody else
        if not target.is_dir() or target.stat().st_uid != os.getuid():
            return part
        shutil.rmtree(part)
    return target


def _counted(tensors: Tensors, progress: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        progress(tensor.nbytes)
        yield name, tensor


def copy_rest(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation defaults and the configs of sentence-transformers' modules, but not the
    model card: its figures are the source's."""
    patterns = [p for p in checkpoint.WANTED if p != "config.json" and "safetensors" not in p]
    for file in sorted([*source.glob("*"), *source.glob("[0-9]_*/config.json")]):
        name = file.relative_to(source)
        if file.is_file() and any(fnmatch.fnmatch(str(name), p) for p in patterns):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
