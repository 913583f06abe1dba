"""``kvasir generate``: answer prompts, as text or as JSON lines.

A single prompt goes through the chat template where the model has one. A JSON line is one request: {"prompt": "..."},
{"messages": [...]} or {"prompt_token_ids": [...]}, plus any sampling parameter by its usual name. Special tokens in a
"prompt" are tokens, unless its line says "parse_special": false. A line that cannot be served becomes a line with
"error" and does not stop the others. Finished answers survive an interrupt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.cli import batch
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError, nearest
from kvasir.plain_files import refuse_special
from kvasir.progress import loading
from kvasir.records import RecordFile
from kvasir.types import SamplingParams

NAMES = {f.name for f in dataclasses.fields(SamplingParams)} - {"grammar"}
# How the text of a raw prompt is read.
READING = ("parse_special", "add_special_tokens")
# Default of max_tokens, where the context has room for it.
USUAL_TOKENS = 256
# Key of an entry that stands for a bad line of the input and holds the error; no key of a user starts with NUL.
BAD_LINE = "\0bad line"


def run(
    config: EngineConfig,
    *,
    prompt: str | None,
    source: Path | None,
    jsonl: bool,
    output: Path | None,
    shared: dict[str, Any],
    chat: bool | None,
    errors: Path | None = None,
    max_output_tokens: int = 0,
    replicas: int = 1,
) -> None:
    """Answer all requests. Raises ConfigError when there are none, and RequestError at the end when any was refused.

    ``chat``: whether a single prompt goes through the chat template; None: if the model has one. ``errors``: file for
    the lines of a batch that failed. ``max_output_tokens``: most tokens of an answer in a batch; 0: no limit.
    ``replicas``: engines that share the work.
    """
    if (prompt is None) == (source is None):
        raise ConfigError("give a prompt with --prompt, or a file with --input (.jsonl for many requests)")
    if output is not None and source is not None and output.resolve() == source.resolve():
        raise ConfigError("--output is the file that --input reads: results would overwrite the requests")
    if errors is not None and source is not None and errors.resolve() == source.resolve():
        raise ConfigError("--errors is the file that --input reads: errors would overwrite the requests")
    jsonl = source is not None and (jsonl or source.suffix == ".jsonl")
    text = prompt if source is None else _read(source)
    if source is not None and batch.is_batch(text):
        if shared or chat is not None:
            raise ConfigError("each line of a batch has its own parameters: leave --params, --chat and the like out")
        return batch.run(config, text, output, errors, max_output_tokens, replicas)
    if max_output_tokens:
        raise ConfigError("--max-output-tokens is for files in OpenAI's batch format; elsewhere use --max-tokens")
    if errors is not None:
        raise ConfigError("--errors is for files in OpenAI's batch format; elsewhere the output holds the errors")
    if jsonl and chat is not None:
        raise ConfigError(
            "--chat and --raw are for a single prompt; a line of JSON says it itself, with 'messages' or 'prompt'"
        )
    lines = parse_lines(text) if jsonl else None
    from kvasir.api.offline.llm import LLM

    with contextlib.ExitStack() as stack:
        # The model starts before the output is opened, so that a failed start leaves an earlier output as it is.
        with loading(config.model.model):
            llm = stack.enter_context(LLM(config=config, replicas=replicas))
        entries = [_single(llm, text, chat)] if lines is None else lines
        write = _print if jsonl else None
        if output is not None:
            if output.is_file():
                os.truncate(output, 0)
            write = stack.enter_context(RecordFile(output)).append
        answers = Answers(write, len(entries))
        # Lines that are written to a terminal show the progress already.
        shown = len(entries) > 1 and sys.stderr.isatty() and not (write is _print and sys.stdout.isatty())
        try:
            complete(llm, entries, shared, answers, progress=shown)
        except KeyboardInterrupt:
            if write is not None:
                done = sum(map(bool, answers.rows))
                print(
                    f"interrupted: {done} of {len(entries)} lines were written to {output or 'stdout'}", file=sys.stderr
                )
            raise
    rows = answers.rows
    if write is None and "outputs" in rows[0]:
        print("\n".join(o["text"] for o in rows[0]["outputs"]))
    refused = [row for row in rows if "error" in row]
    if refused:
        first = refused[0]["error"]
        where = f"{len(refused)} of {len(rows)} requests were refused; request {refused[0]['index']}: " if jsonl else ""
        raise RequestError(where + first["message"], param=first["param"])


def _single(llm: Any, text: str, chat: bool | None) -> dict[str, Any]:
    if chat is None:
        chat = llm.tokenizer is not None and "default" in llm.tokenizer.templates
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def _read(source: Path) -> str:
    """The text of a file, or of stdin. Raises ConfigError."""
    if str(source) != "-":
        refuse_special(source, "--input")
    try:
        return (sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()).decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(f"cannot read {source}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{source} is not UTF-8 text: {e}") from e


def parse_params(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--params is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ConfigError("--params must be a JSON object, e.g. '{\"temperature\": 0}'")
    if unknown := sorted(set(values) - NAMES):
        raise ConfigError(
            f"--params: unknown '{unknown[0]}'.{nearest(unknown[0], NAMES)} There are {', '.join(sorted(NAMES))}"
        )
    return values


def parse_lines(text: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError(f"got {type(entry).__name__}")
        except (ValueError, RecursionError) as e:
            entry = {BAD_LINE: f"line {number} is not a JSON object: {e}"}
        entries.append(entry)
    return entries


def _print(line: bytes) -> None:
    print(line.decode(), flush=True)


class Answers:
    """The rows of all requests. ``write``: takes a row as soon as all rows before it are written; None: nobody does."""

    def __init__(self, write: Callable[[bytes], None] | None, count: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(count)]
        self._line, self._next = write, 0

    def put(self, index: int, **row: Any) -> None:
        self.rows[index] = {"index": index, **row}
        while self._next < len(self.rows) and self.rows[self._next]:
            self._next += 1
            self._write(self.rows[self._next - 1])

    def put_rest(self) -> None:
        """Write the finished rows that wait for an earlier one, after an interrupt or a fault.
        Each row has its index."""
        for row in filter(None, self.rows[self._next :]):
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self._line is not None:
            text = json.dumps(row, ensure_ascii=False)
            self._line(text.encode(errors="backslashreplace"))  # UTF-8 cannot hold lone surrogates


def complete(
    llm: Any, entries: list[dict[str, Any]], shared: dict[str, Any], answers: Answers, *, progress: bool
) -> None:
    """Answer every entry. Refused ones do not stop the rest."""
    prompts, params, places = [], [], []

    def put(number: int, result: Any) -> None:
        if result.error is not None:
            answers.put(places[number], error={"message": result.error.message, "param": result.error.param})
            return
        answers.put(
            places[number],
            prompt_tokens=len(result.prompt_token_ids),
            outputs=[
                {"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason} for o in result.outputs
            ],
        )

    try:
        for i, entry in enumerate(entries):
            try:
                prompt, sampling = _request(llm, entry, shared)
                llm.check(prompt, sampling)
            except RequestError as e:
                answers.put(i, error={"message": e.message, "param": e.param})
                continue
            prompts.append(prompt)
            params.append(sampling)
            places.append(i)
        llm.generate(prompts, params, use_tqdm=progress, on_done=put)
    except BaseException:
        answers.put_rest()
        raise


def _request(llm: Any, entry: dict[str, Any], shared: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Parse an entry into a prompt of token ids and its sampling parameters. Raises RequestError."""
    if BAD_LINE in entry:
        raise RequestError(entry[BAD_LINE], param="input")
    asked = {**shared, **entry}
    kinds = [k for k in ("prompt", "messages", "prompt_token_ids") if k in entry]
    if len(kinds) != 1:
        raise RequestError("give exactly one of prompt, messages, prompt_token_ids", param="prompt")
    read = {name: asked.pop(name) for name in READING if kinds[0] == "prompt" and name in asked}
    ids = _token_ids(llm, kinds[0], asked.pop(kinds[0]), read)
    if unknown := sorted(set(asked) - NAMES):
        raise RequestError(f"unknown parameter '{unknown[0]}'.{nearest(unknown[0], NAMES)}", param=unknown[0])
    asked.setdefault("max_tokens", max(1, min(USUAL_TOKENS, llm.info.max_model_len - len(ids))))
    try:
        if isinstance(bias := asked.get("logit_bias"), dict):
            asked["logit_bias"] = {int(token): value for token, value in bias.items()}  # keys of JSON are strings
        return {"prompt_token_ids": ids}, llm.default_sampling_params(**asked)
    except (TypeError, ValueError) as e:
        raise RequestError(f"bad sampling parameters: {e}") from e


def _token_ids(llm: Any, kind: str, content: Any, read: dict[str, Any]) -> list[int]:
    wanted = str if kind == "prompt" else list
    if not isinstance(content, wanted):
        raise RequestError(
            f"{kind} must be {'text' if wanted is str else 'a list'}, got {type(content).__name__}", param=kind
        )
    if kind == "prompt_token_ids":
        return content
    if llm.tokenizer is None:
        raise RequestError("without a tokenizer (--skip-tokenizer-init) only prompt_token_ids are served", param=kind)
    if kind == "prompt":
        from kvasir.api.offline.offline_pooling import reading

        return llm.tokenizer.prompt_ids(content, *reading(read))
    from kvasir.api.text.chat import check_messages

    return llm.tokenizer.encode_chat(check_messages(content))
