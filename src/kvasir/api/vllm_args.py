"""A command line written for vLLM as one of ours: flags that change nothing are left out with a line that says why, and
vLLM's words become our own. What it asks for and gets in another way is in `vllm_flags`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kvasir.api.vllm_flags import (
    NOTED,
    ONLY_AT,
    ONLY_AT_OFFLINE,
    SATISFIED,
    SATISFIED_OFFLINE,
    SPECULATION,
    SPELLINGS,
    SWITCHES,
    UNSERVED,
    VALUES,
    VALUES_NOTED,
    unserved_value,
)
from kvasir.errors import ConfigError
from kvasir.logs import log

# Short flags that take their value, or one of its parts, without a blank: -O3, -cc.mode=3.
SHORT = ("-O", "-cc", "-ac")
# Flags whose numbers may be written short: 16k is 16,000 and 16K is 16,384.
COUNTS = ("--max-model-len", "--max-num-batched-tokens")
UNITS = {"k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20, "g": 1_000_000_000, "G": 1 << 30}
# Every flag of vLLM that is named anywhere.
KNOWN = frozenset(
    {*SATISFIED, *NOTED, *UNSERVED, *VALUES_NOTED, SPECULATION}
    | {flag for flags in (*ONLY_AT, *ONLY_AT_OFFLINE) for flag in flags}
)
# Methods of speculation that need heads trained for vLLM.
HEADS = re.compile(r"mtp|.*_mtp|eagle|eagle3|medusa|mlp_speculator|dflash|dspark|hydra|extract_hidden_states")


def translated(args: Sequence[str], own: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the arguments without vLLM's flags that change nothing here, its words as ours, and one line for each flag
    that was left out.

    Flags come as ``--a b``, ``--a=b``, ``--a.b c``, ``--a_b c`` and ``--no-a``. ``own``: flags of the command itself,
    which stay. Raises ConfigError for a speculation that cannot be read.
    """
    left: list[str] = []
    said: dict[str, str] = {}
    drafts: dict[str, Any] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            left += [arg, *rest]
            break
        flag, part, value = _parts(arg, own)
        if not arg.startswith("-"):
            left.append(arg)
        elif flag == SPECULATION and flag not in own:
            drafts |= _config(part, rest.pop(0) if value is None and rest else value)
        elif flag in SPELLINGS or flag in VALUES_NOTED or flag in COUNTS:
            if value is None and rest:
                value = rest.pop(0)
            if why := VALUES_NOTED.get(flag, {}).get(value):
                said[flag] = f"vLLM's {flag} {value} changes nothing here: {why}."
            elif flag in own or flag in KNOWN:
                left += SPELLINGS.get(flag, {}).get(value, [flag, *([] if value is None else [_count(flag, value)])])
            else:
                left += [arg, *([] if value is None or "=" in arg else [value])]
        elif flag in own or flag not in NOTED:
            left.append(
                flag + arg.partition("=")[1] + (value or "") if not part and (flag in own or flag in KNOWN) else arg
            )
        elif flag in VALUES and value is None and (not rest or rest[0].startswith("--")):
            left.append(arg)  # its value is missing: an unknown flag says so
        else:
            if flag in VALUES and value is None:
                rest.pop(0)
            said[flag] = f"vLLM's {flag} changes nothing here: {NOTED[flag]}."
    if drafts:
        options, said[SPECULATION] = speculation(drafts)
        end = left.index("--") if "--" in left else len(left)
        if "--drafter" not in [arg.partition("=")[0] for arg in left[:end]]:  # that of the command line wins
            left[end:end] = options_as_args(options)
    return left, list(said.values())


def _parts(arg: str, own: Collection[str]) -> tuple[str, str, str | None]:
    """The flag that an argument names, the part of its value that ``--flag.part`` names ("": the whole), and the value
    in the argument (None: the next argument is the value)."""
    head, equals, value = arg.partition("=")
    if short := next((s for s in SHORT if arg.startswith(s) and not arg.startswith("--")), ""):
        glued = arg[len(short) :]
        return short, glued, (value if equals or not glued.startswith(".") and glued else None)
    plain, _, part = head.partition(".")
    dashed = plain[:2] + plain[2:].replace("_", "-") if plain.startswith("--") else plain
    # Turning off what does nothing does nothing; to turn off what happens anyway is another matter.
    positive = dashed.replace("--no-", "--", 1)
    if dashed.startswith("--no-") and positive in SWITCHES and positive != "--async-scheduling":
        dashed = positive
    flag = dashed if dashed in own or dashed in KNOWN or dashed in SPELLINGS else plain
    return flag, part, value if equals else None


def _count(flag: str, value: str) -> str:
    """A number that may be written short, in digits."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value) if flag in COUNTS else None
    return value if found is None else str(int(float(found[1]) * UNITS[found[2]]))


def _config(part: str, value: str | None) -> dict[str, Any]:
    """One argument of ``--speculative-config``: JSON, or one key of it after a dot. Raises ConfigError."""
    try:
        read = json.loads(value or "")
    except ValueError:
        read = value if part else None
    if part and value:
        return {part: read}
    if isinstance(read, dict):
        return read
    raise ConfigError(f"--speculative-config {value}: expected a JSON object. Or use --drafter, e.g. --drafter suffix")


def speculation(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return our settings for vLLM's ``speculative_config``, and a line that says what they are. Heads trained for vLLM
    are not read; as drafts change no token, the model then runs without. Raises ConfigError for an unknown method."""
    method = config.get("method") or ("draft_model" if config.get("model") else None)
    if method in ("ngram", "[ngram]", "ngram_gpu"):
        keys = {"prompt_lookup_max": "max_match", "prompt_lookup_min": "min_match"}
        drafter = _spec("ngram", {ours: config[theirs] for theirs, ours in keys.items() if config.get(theirs)})
    elif method == "suffix":
        drafter = "suffix"
    elif method == "draft_model" and config.get("model"):
        drafter = _spec("draft_model", {"model": config["model"]})
    elif isinstance(method, str) and HEADS.fullmatch(method):
        return {}, (
            f"vLLM's --speculative-config changes no token here: draft heads ('{method}') are not read, and nothing is "
            "drafted. --drafter suffix drafts from the text so far."
        )
    else:
        raise ConfigError(
            f"kvasir does not serve vLLM's --speculative-config with method {method!r}: use --drafter, e.g. --drafter "
            "suffix or --drafter draft_model:model=NAME."
        )
    options: dict[str, Any] = {"drafter": drafter}
    if isinstance(count := config.get("num_speculative_tokens"), int):
        options["max_draft_tokens"] = count
    return options, f"vLLM's --speculative-config is read as {' '.join(options_as_args(options))}."


def _spec(name: str, options: Mapping[str, Any]) -> str:
    """A technique with its options, as one string."""
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def options_as_args(options: Mapping[str, Any]) -> Iterator[str]:
    """Settings as arguments of a command line."""
    for name, value in options.items():
        yield from (f"--{name.replace('_', '-')}", str(value))


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``LLM`` without vLLM's flags, and its words as ours. Raises ConfigError for a flag that is
    not served."""
    left = dict(options)
    if isinstance(drafts := left.pop("speculative_config", None), Mapping):
        ours, line = speculation(drafts)
        log.info(line)
        left = ours | left
    if left.get("quantization", ...) is None:  # vLLM's way to say: as stored
        del left["quantization"]
    for name, value in options.items():
        plain = "--" + name.replace("_", "-")
        if plain == SPECULATION:
            continue
        flag = plain.replace("--", "--no-", 1) if value is False else plain
        only = next((served for flags, served in (ONLY_AT | ONLY_AT_OFFLINE).items() if flag in flags), ())
        if only and value is not None and str(value) not in only:
            raise ConfigError(unserved_value(plain, f"{name}={value!r}", only))
        # 0 GiB of offload and empty overrides ask for nothing, and a feature may be turned off.
        if flag in UNSERVED and (value or flag != plain):
            raise ConfigError(f"kvasir does not serve vLLM's {name}={value!r}: {UNSERVED[flag]}.")
        spelled = SPELLINGS.get(plain, {}).get(str(value))
        if (
            only
            or flag in (*SATISFIED, *SATISFIED_OFFLINE)
            or plain in UNSERVED  # it was not asked for
            or plain in NOTED
            or spelled
            or value in VALUES_NOTED.get(plain, ())
        ):
            del left[name]
        if spelled:
            left |= {spelled[0][2:].replace("-", "_"): spelled[1] if spelled[1:] else True}
    return left
