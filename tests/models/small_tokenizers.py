"""Tokenizers small enough to train in a test, one of each kind whose decoding differs."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog. ",
    "Hello there, world! How are you today? I am fine.",
    "naïve café 🙂 привет мир 你好",
    'def f(x):\n    return {"a": [1, 2, 3]}\n',
    "user system assistant tool im_start im_end think",
] * 4

# ChatML with tools and thinking, written for these tests in the manner of the Qwen templates.
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + ((messages[0].content + '\\n') if messages[0].role == 'system' else '') }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call with <tool_call></tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def _finish(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return backend


def byte_level() -> Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return _finish(backend)


def _byte_fallback_vocab(backend: Tokenizer, prefix: str) -> tuple[dict, list]:
    state = json.loads(backend.to_str())["model"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for token in state["vocab"]:
        vocab.setdefault(token, len(vocab))
    return vocab, [tuple(m) for m in state["merges"]]


def sentencepiece(legacy: bool = True) -> Tokenizer:
    """A tokenizer like those of Llama 2 and Mistral: a space before the text, bytes for unknown characters, and the
    first space dropped in decoding.

    ``legacy``: the space comes from the normalizer, and again after every special token.
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT[:2], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    vocab, merges = _byte_fallback_vocab(trained, "▁")
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        backend.normalizer = trained.normalizer
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _finish(backend)


def unigram() -> Tokenizer:
    """A tokenizer like that of T5: Metaspace, and special tokens that are ordinary pieces of the vocabulary."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return _finish(backend)


def wordpiece() -> Tokenizer:
    """A tokenizer like that of BERT: only the library knows how its tokens join."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    return _finish(backend)


TRAINERS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece_first": lambda: sentencepiece(legacy=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
}
KINDS = tuple(TRAINERS)


@functools.cache
def _trained(kind: str) -> str:
    return TRAINERS[kind]().to_str()  # training is not repeatable to the last piece, so each kind is trained once


def backend(kind: str) -> Tokenizer:
    """A fresh copy of the named kind, as the `tokenizers` library's object."""
    return Tokenizer.from_str(_trained(kind))


@functools.cache
def make(kind: str, template: str | None = CHATML):
    """The named kind as a kvasir Tokenizer."""
    from kvasir.models.tokenizer import Tokenizer as Ours

    return Ours(
        backend(kind), {"bos_token": "<s>", "eos_token": "<|im_end|>"}, {"default": template} if template else {}
    )
