"""Checkpoint folders as streams: read tensors one by one, write them in shards, and convert a whole folder.

The new folder gets its name only when it is complete and fits its config.json. Until then it has a temporary name.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.models.loader import INDEX, SINGLE, assign, read_headers

if TYPE_CHECKING:
    import torch

    from kvasir.convert.converter import Tensors

SHARD_BYTES = 4 << 30  # Most bytes of a shard.
RECORD = "conversion.json"


def read_tensors(path: Path) -> Tensors:
    """Yield every tensor of a checkpoint folder, file by file. Raises ConfigError for a damaged or missing file."""
    from safetensors import SafetensorError, safe_open

    for file, names in _by_file(path).items():
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in names:
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"{file} cannot be read: {e}") from e


def _by_file(path: Path) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for tensor in read_headers(path):
        found.setdefault(tensor.file, []).append(tensor.name)
    return found


def write_tensors(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a stream as model.safetensors, or as shards and their index. Returns the bytes of all tensors.

    A shard has at most ``shard_bytes``, but at least one tensor. One shard is held in memory at a time.
    """
    from safetensors.torch import save_file

    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    total = size = 0

    def flush() -> None:
        file = folder / f"shard-{len(shards) + 1}.safetensors"
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
        shards[0][0].rename(folder / SINGLE)
        return total
    weight_map = {}
    for i, (file, names) in enumerate(shards, 1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def convert(
    converter: Converter,
    spec: str,
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Convert the checkpoint in ``source`` into the new folder ``target``, tokenizer and templates included.

    ``spec`` is the converter as the user wrote it, for the record that is returned and kept in ``conversion.json``.
    ``progress`` receives the bytes of each tensor read. Raises ConfigError when the source cannot be converted or the
    target cannot be written; then nothing is left behind.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name a new folder")
    about = Source.of(source, checkpoint.read_config(source))
    converter.check(about)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as e:
        raise ConfigError(f"cannot write {target}: {e.strerror}") from e
    try:
        total = write_tensors(part, converter.tensors(about, _counted(read_tensors(source), progress)), shard_bytes)
        config = converter.edit_config(about)
        _write_json(part / "config.json", config)
        assign(read_headers(part), build_spec(config))
        _copy_rest(source, part)
        record = {"converter": spec, "exact": converter.exact, "source": source.resolve().name, "bytes": total}
        _write_json(part / RECORD, record)
        part.chmod(0o755)
        part.replace(target)
    except OSError as e:
        raise ConfigError(f"cannot write {target}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return record


def _counted(tensors: Tensors, progress: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        progress(tensor.nbytes)
        yield name, tensor


def _copy_rest(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation defaults, but not the model card: its figures are the source's."""
    patterns = [p for p in checkpoint.WANTED if p != "config.json" and "safetensors" not in p]
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch.fnmatch(file.name, p) for p in patterns):
            shutil.copyfile(file, target / file.name)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
