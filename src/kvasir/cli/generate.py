"""``kvasir generate``: prompts in, text or JSON lines out. JSON lines are one request each:

{"prompt": "..."} or {"messages": [...]} or {"prompt_token_ids": [...]}, plus any sampling parameter by its usual name.
A line that cannot be served becomes a line with "error"; the others go on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError
from kvasir.types import SamplingParams

NAMES = {f.name for f in dataclasses.fields(SamplingParams)} - {"grammar"}


def run(config: EngineConfig, *, prompt: str | None, source: Path | None, output: Path | None, params: str | None, chat: bool) -> None:
    if (prompt is None) == (source is None):
        raise ConfigError("give a prompt with --prompt, or a file with --input (.jsonl for many requests)")
    shared = parse_params(params)
    text = None if source is None else sys.stdin.read() if str(source) == "-" else _read(source)
    if source is not None and source.suffix == ".jsonl":
        entries = parse_lines(text or "")
    else:
        content = prompt if prompt is not None else text
        entries = [{"messages": [{"role": "user", "content": content}]} if chat else {"prompt": content}]
    from kvasir.api.llm import LLM

    with LLM(config=config) as llm:
        rows = complete(llm, entries, shared, progress=len(entries) > 1 and sys.stderr.isatty())
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if output is not None:
        output.write_text("\n".join(lines) + "\n")
    elif source is not None and source.suffix == ".jsonl":
        print("\n".join(lines))
    elif "error" in rows[0]:
        raise RequestError(rows[0]["error"]["message"], param=rows[0]["error"]["param"])
    else:
        print("\n".join(o["text"] for o in rows[0]["outputs"]))


def _read(source: Path) -> str:
    try:
        return source.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {source}: {e}") from e


def parse_params(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--params is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ConfigError('--params must be a JSON object, e.g. \'{"temperature": 0}\'')
    if unknown := set(values) - NAMES:
        raise ConfigError(f"--params: unknown {', '.join(sorted(unknown))}; there are {', '.join(sorted(NAMES))}")
    return values


def parse_lines(text: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not an object")
        except ValueError as e:
            entry = {"error": f"line {number} is not a JSON object: {e}"}
        entries.append(entry)
    return entries


def complete(llm: Any, entries: list[dict[str, Any]], shared: dict[str, Any], *, progress: bool) -> list[dict[str, Any]]:
    """One result row per entry, in order. Entries that are refused do not stop the rest."""
    rows: list[dict[str, Any]] = [{} for _ in entries]
    prompts, params, places = [], [], []
    for i, entry in enumerate(entries):
        try:
            prompt, sampling = _request(llm, entry, shared)
            llm.check(prompt, sampling)
        except RequestError as e:
            rows[i] = {"index": i, "error": {"message": e.message, "param": e.param}}
            continue
        prompts.append(prompt)
        params.append(sampling)
        places.append(i)
    for place, result in zip(places, llm.generate(prompts, params, use_tqdm=progress)):
        rows[place] = {"index": place, "prompt_tokens": len(result.prompt_token_ids), "outputs": [
            {"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason} for o in result.outputs]}
    return rows


def _request(llm: Any, entry: dict[str, Any], shared: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    if isinstance(entry.get("error"), str) and len(entry) == 1:
        raise RequestError(entry["error"], param="input")
    entry = dict(entry)
    kinds = [k for k in ("prompt", "messages", "prompt_token_ids") if k in entry]
    if len(kinds) != 1:
        raise RequestError("give exactly one of prompt, messages, prompt_token_ids", param="prompt")
    content = entry.pop(kinds[0])
    if unknown := set(entry) - NAMES:
        raise RequestError(f"unknown {', '.join(sorted(unknown))}", param=sorted(unknown)[0])
    try:
        sampling = llm.default_sampling_params(**shared | entry)
    except TypeError as e:
        raise RequestError(f"bad sampling parameters: {e}") from e
    if kinds[0] == "messages":
        return {"prompt_token_ids": llm.tokenizer.encode_chat(content)}, sampling
    return {kinds[0]: content}, sampling
