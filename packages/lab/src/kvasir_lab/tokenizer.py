"""The lab's tokenizer: a byte-level BPE of 2,048 entries with every digit alone and special tokens for later methods.

All 256 bytes have a token, so any text round-trips. Special tokens are reserved here once, so that no checkpoint ever
needs a larger vocabulary. `write` makes the files of an HF folder; `kvasir_lab.training.train_tokenizer` trains it.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.errors import ConfigError
from kvasir_lab.chat import TEMPLATE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048
# Control tokens vanish from decoded text. Tags are ordinary text to a reader, as in Qwen3's tokenizer.
CONTROL = ("<pad>", "<bos>", "<eos>", "<mask>", "<|im_start|>", "<|im_end|>")
STOPS = ("<|im_end|>", "<eos>")  # either ends a reply
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<summary>",
    *(f"<think{i}>" for i in range(1, 9)),
)
SPARE = tuple(f"<spare{i}>" for i in range(32 - len(CONTROL) - len(TAGS)))
SPECIAL = CONTROL + TAGS + SPARE
# Ordinary words that later methods steer by; each is a single token, alone and after a space.
SINGLE = ("Wait", "But", "Alternatively", "###", " Wait", " But", " Alternatively")


def check(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the lab's.

    Raises ConfigError for a wrong size, a moved special token, or a word of SINGLE that is split.
    """
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ConfigError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, the lab's has {VOCAB_SIZE}")
    for i, token in enumerate(SPECIAL):
        if tokenizer.token_to_id(token) != i:
            raise ConfigError(f"the special token {token} is not entry {i} of the tokenizer")
    for word in (*SINGLE, *"0123456789"):
        if len(tokenizer.encode(word, add_special_tokens=False).ids) != 1:
            raise ConfigError(f"'{word}' is not a single token")


def load(folder: str | Path) -> Tokenizer:
    """The tokenizer in ``folder``. Raises ConfigError when there is none or it is not the lab's."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer.json in {folder}: name a folder written by `python -m kvasir_lab.training.train_tokenizer`"
        )
    tokenizer = Tokenizer.from_file(str(file))
    check(tokenizer)
    return tokenizer


@functools.cache
def shipped_tokenizer() -> Tokenizer:
    """The tokenizer of the models that ship. Raises ConfigError when it is missing."""
    return load(str(files("kvasir").joinpath("assets", "base")))


def write(tokenizer: Tokenizer, folder: str | Path, max_length: int = 2048) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers' AutoTokenizer reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = {
        str(i): {
            "content": t,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": t not in TAGS,
        }
        for i, t in enumerate(SPECIAL)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
