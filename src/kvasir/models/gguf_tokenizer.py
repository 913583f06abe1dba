"""The tokenizer of a GGUF file as ``tokenizers`` has it, with its special tokens and chat template.

Kinds: byte-level BPE (``gpt2``), cut into words as `gguf_words` has it, and SentencePiece (``llama``), whose pieces
have scores and no merges. Others are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvasir.errors import ConfigError
from kvasir.models.gguf_file import GGUFFile
from kvasir.models.gguf_words import BEGINS, COMPOSED, WHOLE, cut

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # kinds of tokens
SPACE = "▁"  # SentencePiece's
ROLES = ("bos", "eos", "unknown", "padding")
# Tokens that end an answer wherever a vocabulary marks them as no ordinary text: files often name only one of them.
ENDS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|end_of_sentence|>",
        "<|END_RESPONSE|>",
        "<|end_of_utterance|>",
        "<EOT>",
        "_<EOT>",
        "[EOS]",
        "</s>",
        "<eos>",
    }
)
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_tokenizer(source: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json. A file without a vocabulary gets none:
    it serves token ids. Raises ConfigError for a tokenizer that is not served."""
    kind = source.field("tokenizer.ggml.model", "none")
    if kind == "none":
        return
    if kind not in MAKERS:
        raise ConfigError(
            f"{source.file}: tokenizer '{kind}' is not served from GGUF; served are {', '.join(MAKERS)}. Give the "
            "model's own with --tokenizer FOLDER and a file without one, or serve the checkpoint it was made from."
        )
    tokens, types = source.field("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type")
    types = types or [NORMAL] * len(tokens)
    tokenizer = MAKERS[kind](source, tokens, types)
    for special, wanted in ((True, (CONTROL, UNKNOWN)), (False, (USER,))):
        added = [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, types) if k in wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    ids = {role: source.field(f"tokenizer.ggml.{role}_token_id") for role in ROLES}
    before, after = _around(source, kind, ids, tokens)
    if before or after:
        single = [*before, "$A", *after]
        around = processors.TemplateProcessing(
            single=single,
            pair=[*single, *before, "$B:1", *after],
            special_tokens=[(token, tokens.index(token)) for token in sorted({*before, *after})],
        )
        first = tokenizer.post_processor
        tokenizer.post_processor = around if first is None else processors.Sequence([first, around])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {NAMES[role]: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)}
    if template := source.field("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = {source.field(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")} - {None}
    # gpt-oss ends each of its messages with <|end|>, and the answer with <|return|> or <|call|>.
    named = ENDS - {"<|end|>"} if "<|return|>" in tokens else ENDS
    ends |= {i for i, (token, k) in enumerate(zip(tokens, types)) if token in named and k in (CONTROL, USER)}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)} if ends else {}))


def _around(source: GGUFFile, kind: str, ids: dict[str, int | None], tokens: list[str]) -> tuple[list[str], list[str]]:
    """The tokens before and after a text."""
    starts = kind == "llama" or source.field("tokenizer.ggml.pre") in BEGINS
    wanted = source.field("tokenizer.ggml.add_bos_token", starts), source.field("tokenizer.ggml.add_eos_token", False)
    before, after = ([tokens[ids[role]]] if add and ids[role] is not None else []
                     for role, add in zip(("bos", "eos"), wanted))  # fmt: skip
    return before, after


def _byte_level(source: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    pre = source.field("tokenizer.ggml.pre")
    words = cut(pre, source.file)
    merges = [tuple(merge.split(" ", 1)) for merge in source.field("tokenizer.ggml.merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE, fuse_unk=False))
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(source: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE whose merges are all ways to join two pieces to a third, the best score first."""
    scores = source.field("tokenizer.ggml.scores")
    ids = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, (token, kind) in enumerate(zip(tokens, types)):
        if kind not in (NORMAL, UNUSED, USER):
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                ranked.append((-scores[i], ids[left], ids[right], (left, right)))
    ranked.sort(key=lambda found: found[:3])
    unknown = source.field("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [pair for *_, pair in ranked],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    first = [normalizers.Prepend(SPACE)] if source.field("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if first else [])])
    return tokenizer


MAKERS = {"gpt2": _byte_level, "llama": _sentence_pieces}
