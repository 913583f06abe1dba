"""Commands that make a checkpoint servable, for the errors that refuse it. Each is one line for a shell.

They use ``transformers`` and ``peft``, which kvasir itself does not need.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from kvasir.plain_files import refuse_special

# The layout in which diffusion models made from Qwen3 are released.
DIFFUSION = "sdar"
LOAD = "from transformers import AutoModelForCausalLM as M"


def _python(code: str, *needs: str) -> str:
    install = f" (pip install {' '.join(needs)})" if needs else ""
    return f"python -c {shlex.quote(code)}{install}"


def merge_adapter(path: Path) -> str:
    """The command that merges an adapter folder into its base model, and the one that serves the result."""
    adapter = shlex.quote(f"merge_lora:adapter={path}")
    return f"kvasir convert {adapter} {_base(path)} merged, then kvasir serve ./merged"


def serve_adapter(path: Path) -> str:
    """The command that serves an adapter folder together with its base model."""
    return f"kvasir serve {_base(path)} --enable-lora --lora-modules {shlex.quote(f'adapter={path}')}"


def _base(path: Path) -> str:
    refuse_special(path)
    try:
        base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return shlex.quote(base) if isinstance(base, str) and base else "BASE"


def from_gguf(file: Path) -> str:
    """The command that turns a GGUF file into a folder in HF format."""
    folder, name = str(file.parent), file.name
    code = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; d, f = {folder!r}, {name!r}; "
        "[c.from_pretrained(d, gguf_file=f).save_pretrained('converted') for c in (M, T)]"
    )
    return f"{_python(code, 'transformers', 'gguf')}, then kvasir serve ./converted"


def to_qwen3() -> str:
    """Say what to do about a released I-DLM model."""
    return "If it is an I-DLM model, make a Qwen3 folder of it: kvasir convert idlm FOLDER NEW, then kvasir serve ./NEW"


def to_safetensors(path: Path) -> str:
    """The command that writes a folder's weights as safetensors."""
    code = f"{LOAD}; M.from_pretrained({str(path)!r}).save_pretrained('converted')"
    return f"{_python(code, 'transformers')}, then kvasir serve ./converted --tokenizer {shlex.quote(str(path))}"


def convert(path: Path, files: list[str]) -> str:
    """Say what to do about a folder whose weights, ``files``, are in another format."""
    if ggufs := [name for name in files if name.endswith(".gguf")]:
        return f"Convert it: {from_gguf(path / ggufs[0])}"
    if all(name.endswith(".safetensors") for name in files):
        return "Weights have the names of HF format: model.safetensors, or shards with model.safetensors.index.json"
    return f"Convert it to safetensors: {to_safetensors(path)}"


def dequantize(method: str) -> str:
    """Say what to do about quantised weights that are not served."""
    if method == "bitsandbytes":
        code = f"{LOAD}; M.from_pretrained('MODEL').dequantize().save_pretrained('converted')"
        return f"Serve the unquantised checkpoint, or write one: {_python(code, 'transformers', 'bitsandbytes')}"
    return "Use the unquantised checkpoint: usually the model that this one's card names as its base"
