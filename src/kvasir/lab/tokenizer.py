"""The lab's tokenizer: a byte-level BPE of 2,048 entries, every digit alone, with the special tokens of every later method.

All 256 bytes have a token, so that any text round-trips. Special tokens are reserved here, once, so that no checkpoint ever
needs its vocabulary grown. Training is deterministic; `write` makes the files of an HF folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.errors import ConfigError
from kvasir.lab.chat import TEMPLATE
from kvasir.lab.task import load_task
from kvasir.lab.tasks.story import books, plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048
# Control tokens vanish from decoded text; tags are ordinary text to a reader, as in Qwen3's tokenizer.
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
# Ordinary words that later methods steer by: single tokens, alone and after a space.
SINGLE = ("Wait", "But", "Alternatively", "###", " Wait", " But", " Alternatively")
# Words keep the space before them, digits stand alone, marks stand apart from letters, line ends apart from everything.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
TASKS = ("chain", "chat", "schema", "tool")
SEED, SAMPLES, REPEATS = 1, 1500, 20000


def corpus() -> Iterator[str]:
    """All training prose, a fixed sample of every task, and the single words often enough to be merged whole."""
    for book in books("train"):
        yield plain(book)
    for name in TASKS:
        for problem in load_task(name).problems("train", SEED, SAMPLES):
            yield "".join(text for text, _ in problem.segments())
    for word in SINGLE:
        yield "\n".join([f".{word}" if word.startswith(" ") else word] * REPEATS)


def train() -> Tokenizer:
    """Train the tokenizer from the shipped text and the tasks: the same result every time, in a few seconds."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIAL],
    )
    texts = [piece for text in corpus() for piece in _without_special(text)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    layout = json.loads(tokenizer.to_str())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    check(tokenizer)
    return tokenizer


def _without_special(text: str) -> list[str]:
    for token in SPECIAL:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def check(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the lab's: wrong size, moved special tokens, split single words. Raises ConfigError."""
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
            f"no tokenizer.json in {folder}: name a folder made by `python -m kvasir.lab.tokenizer FOLDER`"
        )
    tokenizer = Tokenizer.from_file(str(file))
    check(tokenizer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: str | Path, max_length: int = 2048) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers' AutoTokenizer reads them."""
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


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m kvasir.lab.tokenizer FOLDER")
    write(train(), sys.argv[1])
