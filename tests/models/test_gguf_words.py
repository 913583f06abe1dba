"""Words of GGUF files' pre-tokenizers: those of the published tokenizer.json files, loaded by ``tokenizers`` itself."""

import json
import random

import pytest
from tokenizers import Tokenizer

from kvasir.errors import ConfigError
from kvasir.models.gguf_tokenizer import write_tokenizer
from kvasir.models.gguf_words import BEGINS, CUTS, WHOLE
from tests.models import small_tokenizers as small
from tests.models.test_gguf_tokenizer import source_of

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
CLITICS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


LLAMA3 = split(CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = split(CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_V3 = [
    split(r"\p{N}{1,3}"),
    split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    split(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
        " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
]
# The ``pre_tokenizer`` of published files, by the name that converters give it.
PUBLISHED = {
    "gpt-2": [GPT2],
    "starcoder": [DIGITS, GPT2],
    "llama-bpe": [LLAMA3, BYTES],
    "chatglm-bpe": [LLAMA3, BYTES],
    "qwen2": [QWEN2, BYTES],
    "stablelm2": [QWEN2, BYTES],
    "deepseek-r1-qwen": [QWEN2, BYTES],
    "qwen35": [
        split(
            CLITICS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+"
        ),
        BYTES,
    ],
    "deepseek-coder": [
        split("[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        DIGITS,
        BYTES,
    ],
    "deepseek-v3": [*DEEPSEEK_V3, BYTES],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        GPT2,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "bloom": [split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), BYTES],
    "seed-coder": [
        split(
            CLITICS + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ],
}
SOME = (
    "Hello WORLD it's WE'LL été naïve e\u0301te\u0301 привет 你好世界 こんにちは 안녕 हिन्दी 1 12 1234567 "
    "½ ٣٤ x_1 f(x) -> {} ... !? 。 ， 🙂 £$^~|` <tag> ÀÉ ﬁ ﾊﾛｰ \u212a \u10d0\u10d1"
).split()
SPACES = ["", " ", " ", "  ", "\n", "\r\n", "\n\n", " \n ", "\t", "   ", "\u3000"]


def texts(count: int = 300) -> list[str]:
    drawn = random.Random(5)
    return [
        "",
        " ",
        "\n",
        *("".join(drawn.choice(SOME) + drawn.choice(SPACES) for _ in range(8)) for _ in range(count)),
    ]


def words(pre_tokenizer, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture
def read(tmp_path):
    """What is made of a file whose tokenizer names the pre-tokenizer ``pre``."""

    def of(pre, **more) -> Tokenizer:
        write_tokenizer(source_of(small.byte_level(), "gpt2", **{"ggml.pre": pre, **more}), tmp_path)
        return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    return of


def published(pre: str) -> Tokenizer:
    state = json.loads(small.byte_level().to_str())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_those_of_the_published_tokenizer(pre, read):
    ours, theirs = read(pre).pre_tokenizer, published(pre).pre_tokenizer
    for text in texts():
        assert words(ours, text) == words(theirs, text), text


@pytest.mark.parametrize("pre", CUTS)
def test_every_name_keeps_the_text(pre, read):
    ours = read(pre)
    for text in texts(40):
        composed = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids) == composed


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        # Its list of marks, ":-~", holds the plain letters as well.
        ("deepseek-llm", "Hi12 \u00fcn\u597d\nx, y", ["Hi", "1", "2", " \u00fc", "n", "\u597d", "\n", "x", ",", " y"]),
        ("deepseek-llm", "\u00e9\ua722\U00010400", ["\u00e9\ua722\U00010400"]),
        ("deepseek-llm", "\u00e9\ua790\u00e9", ["\u00e9", "\ua790", "\u00e9"]),  # younger than its list of letters
        ("deepseek-coder", "Hi12 a_b()\n  c", ["Hi", "1", "2", " a", "_", "b", "()", "\n", " ", " c"]),
        ("deepseek-v3", "Hi12345 a.b好の\n", ["Hi", "123", "45", " a", ".b", "好の", "\n"]),
        ("hunyuan-dense", "12345", ["123", "45"]),
        ("qwen35", "हिन्दी 12", ["हिन्दी", " ", "1", "2"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("stablelm2", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("glm4", "12345", ["123", "45"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("viking", "abc12, d", ["abc", "1", "2", ",", " d"]),
        ("poro-chat", "abc12, d", ["abc12", ",", " d"]),
        ("superbpe", "a b 1234567", ["a b ", "1", "234", "567"]),
        ("bailingmoe", "it's\n\n12", ["it", "'s", "\n\n", "1", "2"]),
        ("youtu", "Hi12好", ["Hi", "1", "2", "好"]),
        ("minicpm5", "a 12345", ["a", " ", "123", "45"]),
        ("llama4", "HelloWorld it's", ["Hello", "World", " it's"]),
        ("exaone", "a12", ["a", "1", "2"]),
    ],
)
def test_words_by_hand(pre, text, want, read):
    assert words(read(pre).pre_tokenizer, text) == want


@pytest.mark.parametrize("pre", BEGINS)
def test_texts_of_these_begin_with_bos_unless_the_file_says_otherwise(pre, read):
    first = read(pre).encode("Hello").ids[0]
    assert first == read(pre).token_to_id("<s>") != read(pre, **{"ggml.add_bos_token": False}).encode("Hello").ids[0]


def test_a_word_that_is_a_token_stays_whole_where_its_file_says_so(read):
    for pre in CUTS:
        assert json.loads(read(pre).to_str())["model"]["ignore_merges"] == (pre in WHOLE), pre
    assert set(WHOLE) <= set(CUTS)


def test_unknown_names_are_answered_with_the_nearest(read):
    with pytest.raises(ConfigError, match="'deepseek-v33' is not served from GGUF. Did you mean 'deepseek-v3'"):
        read("deepseek-v33")
    with pytest.raises(ConfigError, match="'unheard-of' is not served from GGUF. Served are gpt-2, .*deepseek-llm"):
        read("unheard-of")
    for missing in ("default", "", None):
        with pytest.raises(ConfigError, match="does not say how its text is cut"):
            read(missing)
