"""Train the lab's tokenizer: ``python -m kvasir_lab.training.train_tokenizer FOLDER``.

It learns from the shipped prose and the tasks, and the result is the same every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvasir_lab.lookup import load_task
from kvasir_lab.tasks.story import books, plain
from kvasir_lab.tokenizer import SINGLE, SPECIAL, TAGS, VOCAB_SIZE, check, write

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words keep the space before them, digits stand alone, marks are split from letters, and line ends from everything.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
TASKS = ("chain", "chat", "schema", "tool")
SEED, SAMPLES, REPEATS = 1, 1500, 20000


def corpus() -> Iterator[str]:
    """All training prose, a fixed sample of each of TASKS, and the single words often enough to become tokens."""
    for book in books("train"):
        yield plain(book)
    for name in TASKS:
        for problem in load_task(name).problems("train", SEED, SAMPLES):
            yield "".join(text for text, _ in problem.segments())
    for word in SINGLE:
        yield "\n".join([f".{word}" if word.startswith(" ") else word] * REPEATS)


def train() -> Tokenizer:
    """Train the tokenizer from the shipped prose and the tasks. Deterministic; takes a few seconds."""
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


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m kvasir_lab.training.train_tokenizer FOLDER")
    write(train(), sys.argv[1])
