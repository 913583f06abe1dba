"""A command line written for vLLM as one of ours: flags that change nothing are left out with a line that says why, and
vLLM's words become our own. What it asks for and gets in another way is in `vllm_flags`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvasir.api.offline.vllm_flags import SPECULATION, vllm_flags
from kvasir.api.offline.vllm_speculation import options_as_args, speculation
from kvasir.errors import ConfigError
from kvasir.logs import log

# Short flags that take their value, or one of its parts, without a blank: -O3, -cc.mode=3.
SHORT = ("-O", "-cc", "-ac")
# Flags whose numbers may be written short: 16k is 16,000 and 16K is 16,384.
COUNTS = ("--max-model-len", "--max-num-batched-tokens")
UNITS = {"k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20, "g": 1_000_000_000, "G": 1 << 30}


def translated(args: Sequence[str], own: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the arguments without vLLM's flags that change nothing here, its words as ours, and one line for each flag
    that was left out.

    Flags come as ``--a b``, ``--a=b``, ``--a.b c``, ``--a_b c`` and ``--no-a``. ``own``: flags of the command itself,
    which stay. Raises ConfigError for a speculation that cannot be read.
    """
    table = vllm_flags()
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
        elif flag in table.spellings or flag in table.values_noted or flag in COUNTS:
            if value is None and rest:
                value = rest.pop(0)
            if why := table.values_noted.get(flag, {}).get(value):
                said[flag] = f"vLLM's {flag} {value} changes nothing here: {why}."
            elif flag in own or flag in table.known:
                left += table.spellings.get(flag, {}).get(
                    value, [flag, *([] if value is None else [_count(flag, value)])]
                )
            else:
                left += [arg, *([] if value is None or "=" in arg else [value])]
        elif flag in own or flag not in table.noted:
            left.append(
                flag + arg.partition("=")[1] + (value or "")
                if not part and (flag in own or flag in table.known)
                else arg
            )
        elif flag in table.values and value is None and (not rest or rest[0].startswith("--")):
            left.append(arg)  # its value is missing: an unknown flag says so
        else:
            if flag in table.values and value is None:
                rest.pop(0)
            said[flag] = f"vLLM's {flag} changes nothing here: {table.noted[flag]}."
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
    table, positive = vllm_flags(), dashed.replace("--no-", "--", 1)
    if dashed.startswith("--no-") and positive in table.switches and positive != "--async-scheduling":
        dashed = positive
    flag = dashed if dashed in own or dashed in table.known or dashed in table.spellings else plain
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


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``LLM`` without vLLM's flags, and its words as ours. Raises ConfigError for a flag that is
    not served."""
    table = vllm_flags()
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
        only = next((served for flags, served in (table.only_at | table.only_at_offline).items() if flag in flags), ())
        if only and value is not None and str(value) not in only:
            raise ConfigError(table.unserved_value(plain, f"{name}={value!r}", only))
        # 0 GiB of offload and empty overrides ask for nothing, and a feature may be turned off.
        if flag in table.unserved and (value or flag != plain):
            raise ConfigError(f"kvasir does not serve vLLM's {name}={value!r}: {table.unserved[flag]}.")
        spelled = table.spellings.get(plain, {}).get(str(value))
        if (
            only
            or flag in (*table.satisfied, *table.satisfied_offline)
            or plain in table.unserved  # it was not asked for
            or plain in table.noted
            or spelled
            or value in table.values_noted.get(plain, ())
        ):
            del left[name]
        if spelled:
            left |= {spelled[0][2:].replace("-", "_"): spelled[1] if spelled[1:] else True}
    return left
