"""The cuts of text into words that byte-level BPE of a GGUF file makes, by the file's ``tokenizer.ggml.pre``.

A cut is a tuple of steps. Each step cuts what the steps before it left, and the regular expressions are those of the
published tokenizer.json files.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from kvasir.errors import ConfigError, nearest

_CLITICS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# Contractions, words, numbers of so many digits, punctuation.
WORDS = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_TAIL}"
# The same with combining marks as parts of words.
MARKED = rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Words that begin at a capital: %(clitics)s may follow, and numbers have %(digits)s digits.
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(clitics)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(clitics)s|"
    rf"\p{{N}}%(digits)s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
)
_CHINESE, _EASTERN = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case, as DeepSeek LLM lists them.
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _CHINESE,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _TAIL,
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

# Steps that are no regular expression of ours: GPT-2's cut, every digit on its own, numbers, and runs of punctuation.
GPT2, DIGITS, NUMBERS, PUNCTUATION = "gpt-2's cut", "digits", "numbers", "punctuation"
_STEPS = {
    GPT2: lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    DIGITS: lambda: pre_tokenizers.Digits(individual_digits=True),
    NUMBERS: lambda: pre_tokenizers.Digits(individual_digits=False),
    PUNCTUATION: lambda: pre_tokenizers.Punctuation("contiguous"),
}
_GPT4O = CASED % {"clitics": f"{_CLITICS}?", "digits": "{1,3}"}
# Names whose texts begin with BOS where the file does not say.
BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Names with which a word that is a token stays whole, whatever its merges.
WHOLE = (*BEGINS, "youtu", "minicpm5")
# Names whose texts are composed (NFC) first.
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2")

CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4"), (GPT2,)),
    **dict.fromkeys(("trillion", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (DIGITS, GPT2)),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), (DIGITS, GPT2)),
    **dict.fromkeys((*BEGINS, "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), (WORDS % "{1,3}",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), (WORDS % "",)),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), (WORDS % "",)),
    "qwen35": (MARKED,),
    "tekken": (CASED % {"clitics": "", "digits": ""},),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _EASTERN,
        DIGITS,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, DIGITS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CHINESE,
        CASED % {"clitics": f"{_CLITICS}?", "digits": ""},
    ),
    "minicpm5": (r"\p{N}{1,3}", WORDS % "+"),
    "falcon": (PUNCTUATION, GPT2, NUMBERS, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, DIGITS),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
            r"\s+(?!\S)|\s+",
        ),
    ),
    "seed-coder": (rf"{_CLITICS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_TAIL}",),
}


def cut(name: str | None, file: object) -> pre_tokenizers.PreTokenizer:
    """Return what cuts a text into the words of BPE, in the alphabet of bytes. Raises ConfigError for a name that is
    not served, with the nearest that is. ``file``: named in that error."""
    if name in (None, "", "default"):
        raise ConfigError(
            f"{file}: the file does not say how its text is cut into words (tokenizer.ggml.pre is "
            f"{name or 'missing'}), and a guess would give wrong tokens. Convert the checkpoint again with a current "
            "converter, or serve the checkpoint."
        )
    if name not in CUTS:
        raise ConfigError(
            f"{file}: pre-tokenizer '{name}' is not served from GGUF.{nearest(name, CUTS)} Served are "
            f"{', '.join(CUTS)}. Serve the checkpoint that the file was made from."
        )
    steps = CUTS[name]
    cuts = [_STEPS[step]() if step in _STEPS else pre_tokenizers.Split(Regex(step), "isolated") for step in steps]
    if GPT2 not in steps:  # that step writes bytes as well
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(cuts)
