"""Tokenizers from the metadata of GGUF files: the ids and texts of the tokenizers that they were made from."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kvasir.errors import ConfigError
from kvasir.models import gguf_words
from kvasir.models.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, USER, write_tokenizer
from kvasir.models.gguf_words import WORDS
from kvasir.models.tokenizer import Tokenizer as Ours
from tests.models import small_tokenizers as small

TEXTS = [*small.TEXT[:5], "It's 12345 o'clock!\n\n  We'll see:\t<x> ", "", " ", "e\u0301t\u00e9 <|im_start|> \u00e9"]


class Source:
    """The metadata of a file that is not there."""

    file = Path("model.gguf")

    def __init__(self, **fields):
        self.fields = {f"tokenizer.{name}": value for name, value in fields.items()}

    def field(self, name, default=None):
        return self.fields.get(name, default)


def source_of(backend: Tokenizer, kind: str, **more):
    """The metadata that llama.cpp's converter writes for a tokenizer."""
    state = json.loads(backend.to_str())
    ids = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.get)
    types = [NORMAL] * len(tokens)
    for token in state["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    found = {"ggml.model": kind, "ggml.tokens": tokens, "ggml.bos_token_id": ids["<s>"],
             "ggml.eos_token_id": ids["<|im_end|>"], "chat_template": small.CHATML}  # fmt: skip
    if kind == "gpt2":
        found["ggml.merges"] = merges
    else:
        scores, rank = [0.0] * len(tokens), {m.replace(" ", "", 1): i for i, m in reversed(list(enumerate(merges)))}
        for i, token in enumerate(tokens):
            scores[i] = -float(rank.get(token, 10_000))
            types[i] = 6 if token.startswith("<0x") else types[i]
        types[ids["<unk>"]] = UNKNOWN
        found |= {"ggml.scores": scores, "ggml.unknown_token_id": ids["<unk>"]}
    return Source(**found | {"ggml.token_type": types} | more)


def cut_by(pattern: str, whole: bool, composed: bool) -> Tokenizer:
    """Byte-level BPE in words of a pattern, as Llama 3 and Qwen have it."""
    backend = Tokenizer(models.BPE(ignore_merges=whole))
    backend.normalizer = normalizers.NFC() if composed else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = small.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*small.TEXT, "12 123 1234 12345 it's we'll\n\n \t e\u0301t\u00e9"] * 2, trainer)
    return small._finish(backend)


KINDS = {
    "gpt-2": (small.byte_level, "gpt2"),
    "llama-bpe": (lambda: cut_by(WORDS % "{1,3}", True, False), "gpt2"),
    "qwen2": (lambda: cut_by(WORDS % "", False, True), "gpt2"),
    "spm": (small.sentencepiece, "llama"),
}


@pytest.mark.parametrize("pre", KINDS)
def test_ids_and_texts_are_those_of_the_original(pre, tmp_path):
    make, kind = KINDS[pre]
    theirs = make()
    write_tokenizer(source_of(theirs, kind, **({} if pre == "spm" else {"ggml.pre": pre})), tmp_path)
    ours = Ours.load(tmp_path)
    for text in TEXTS:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == want
        assert ours.decode(want, skip_special=False) == theirs.decode(want, skip_special_tokens=False)
    begins = [theirs.token_to_id("<s>")] if pre in ("llama-bpe", "spm") else []
    assert ours.encode("Hello there") == begins + theirs.encode("Hello there", add_special_tokens=False).ids
    assert (
        ours.eos_ids == (theirs.token_to_id("<|im_end|>"), theirs.token_to_id("</s>")) and "default" in ours.templates
    )
    assert theirs.token_to_id("<think>") not in ours.special_ids, "what a user defined is text"


@pytest.mark.parametrize(
    ("pre", "words"),
    {
        "tekken": [
            "Hello",
            "World",
            " foo",
            "Bar",
            " HTTPserver",
            " ",
            "1",
            "2",
            "3",
            "4",
            " it",
            "'s",
            " a",
            "/\n",
            "b",
        ],
        "gpt-4o": ["Hello", "World", " foo", "Bar", " HTTPserver", " ", "123", "4", " it's", " a", "/\n", "b"],
        "starcoder": [
            "HelloWorld",
            " fooBar",
            " HTTPserver",
            " ",
            "1",
            "2",
            "3",
            "4",
            " it",
            "'s",
            " a",
            "/",
            "\n",
            "b",
        ],
        "llama-v3": ["HelloWorld", " fooBar", " HTTPserver", " ", "123", "4", " it", "'s", " a", "/\n", "b"],
        "olmo": ["HelloWorld", " fooBar", " HTTPserver", " 1234", " it", "'s", " a", "/", "\n", "b"],
    }.items(),
)
def test_usual_names_of_pre_tokenizers(pre, words, tmp_path):
    write_tokenizer(source_of(small.byte_level(), "gpt2", **{"ggml.pre": pre}), tmp_path)
    cut = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    text = "HelloWorld fooBar HTTPserver 1234 it's a/\nb"
    found = [text[a:b] for _, (a, b) in cut.pre_tokenize_str(text)]
    assert found == words and "".join(found) == text


def test_another_way_to_cut_words_is_noticed(tmp_path, monkeypatch):
    theirs = cut_by(WORDS % "{1,3}", True, False)
    monkeypatch.setitem(gguf_words.CUTS, "llama-bpe", (WORDS % "",))
    write_tokenizer(source_of(theirs, "gpt2", **{"ggml.pre": "llama-bpe"}), tmp_path)
    text = "12345 1234 123"
    assert Ours.load(tmp_path).encode(text, add_special=False) != theirs.encode(text, add_special_tokens=False).ids


def test_what_the_file_says_about_its_ends_is_followed(tmp_path):
    theirs = small.byte_level()
    end, begin = theirs.token_to_id("</s>"), theirs.token_to_id("<s>")
    more = {"ggml.pre": "qwen2", "ggml.add_bos_token": True, "ggml.add_eos_token": True, "ggml.eot_token_id": end}
    write_tokenizer(source_of(theirs, "gpt2", **more), tmp_path)
    ours = Ours.load(tmp_path)
    ids = ours.encode("abc")
    assert ids[0] == begin and ids[-1] == theirs.token_to_id("<|im_end|>") and end in ours.eos_ids
    assert ours.encode_pair("a", "b").count(begin) == 2


def test_every_end_token_that_the_vocabulary_names_ends(tmp_path):
    ends = ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>"]
    for others, wanted in (
        (ends, ends),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),  # gpt-oss ends a message with <|end|>
    ):
        theirs = small.byte_level()
        theirs.add_special_tokens([small.AddedToken(t, special=True, normalized=False) for t in others])
        write_tokenizer(source_of(theirs, "gpt2", **{"ggml.pre": "qwen2"}), tmp_path)
        ours = Ours.load(tmp_path)
        assert {ours.id_to_token(i) for i in ours.eos_ids} == {"<|im_end|>", "</s>", *wanted}
    word = source_of(theirs, "gpt2", **{"ggml.pre": "qwen2"})
    word.fields["tokenizer.ggml.token_type"][theirs.token_to_id("</s>")] = NORMAL
    write_tokenizer(word, tmp_path)
    assert "</s>" not in {ours.id_to_token(i) for i in Ours.load(tmp_path).eos_ids}, "an ordinary piece ends nothing"


def test_other_tokenizers_are_refused_by_name(tmp_path):
    theirs = small.byte_level()
    with pytest.raises(ConfigError, match="pre-tokenizer 'poro' is not served.*llama-bpe"):
        write_tokenizer(source_of(theirs, "gpt2", **{"ggml.pre": "poro"}), tmp_path)
    with pytest.raises(ConfigError, match="tokenizer 'rwkv' is not served"):
        write_tokenizer(Source(**{"ggml.model": "rwkv"}), tmp_path)
    write_tokenizer(Source(), tmp_path)
    assert not list(tmp_path.iterdir()), "a file without a vocabulary serves token ids"
