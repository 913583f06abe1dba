"""Translation of text to token ids and back, and of chat messages to a prompt. Needs only the ``tokenizers`` library.

A raw prompt is read as ``transformers`` reads it (``prompt_ids``): marks in it are tokens. In a chat, user text cannot
act as part of the template. A special-token string in it (``<|im_end|>``) is encoded as plain text:
before rendering, each such string is replaced by one private character. The rendered text is encoded, and only the
stretches that hold a private character are restored and encoded again, with every special token switched off. Messages
without such strings take the ordinary path and give the same ids as ``transformers``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from kvasir.errors import ConfigError, RequestError, is_bug, nearest
from kvasir.models.chat_messages import Marks, longest_first, normal, restore, unused
from kvasir.models.chat_template import RESERVED, ChatTemplate, render_isolated
from kvasir.models.checkpoint import end_ids
from kvasir.models.declared_tokens import added_tokens, extra_specials, named_tokens
from kvasir.models.growth import check_growth
from kvasir.models.guarded import Guarded, try_expressions
from kvasir.models.template_files import read_object, templates_in
from kvasir.models.text_stream import TextStream, TokenBytes, TokenCodec, WindowStream
from kvasir.plain_files import refuse_special

TAG = re.compile(r"</?[a-z_]+>")
# A character put before a stretch of text that is not the start of its prompt, so that it is encoded as a continuation.
ANCHOR = "\U0010fffd"
# A character that no vocabulary holds.
UNKNOWN = "\U0010fffc"


class Tokenizer:
    """The tokenizer of a model, with its chat templates.

    ``config``: what the model's files say about it. ``size``: highest id + 1. ``special_ids``: ids that ``decode``
    skips. ``eos_ids``: ids that end an answer.
    """

    def __init__(
        self,
        backend: Backend,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.config = config = dict(config or {})
        backend = Guarded(backend)
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, config)
        self._backend = backend
        self.templates = {name: ChatTemplate(source) for name, source in (templates or {}).items()}
        self.named_tokens = named_tokens(config)
        added = backend.get_added_tokens_decoder()
        declared = [*self.named_tokens.values(), *extra_specials(config)]
        special = {i for i, token in added.items() if token.special} | {backend.token_to_id(text) for text in declared}
        self.special_ids = frozenset(special - {None})
        own_eos = self.eos_token_id
        self.eos_ids = tuple(dict.fromkeys(([own_eos] if own_eos is not None else []) + list(eos_ids)))
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._added = frozenset(t.content for t in added.values())
        literals = "\0".join(t.literals for t in self.templates.values())
        control = {
            i for i, t in added.items() if t.content.strip(" \t\r\n▁") and t.content in literals
        } | self.special_ids
        # Any text may give the unknown token, which means nothing to a model.
        control -= set(backend.encode(UNKNOWN, add_special_tokens=False).ids)
        self._control = {backend.id_to_token(i): i for i in control}
        self._control_ids = frozenset(control)
        # Marks that a model writes and that an assistant message sent back may hold: <think>, </tool_call>.
        self._tags = frozenset(
            c for c, i in self._control.items() if TAG.fullmatch(c) and (i not in self.special_ids or "think" in c)
        )
        self._codec = TokenCodec.of(backend)
        self._bytes = TokenBytes(self.id_to_token, self._codec)
        self._texts: dict[int, str] = {}  # texts of single tokens, if only the library knows them

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder (or a tokenizer.json). ``chat_template``: a file, or the template
        itself. Raises ConfigError."""
        path = Path(path)
        folder = path.parent if path.is_file() else path
        file = path if path.is_file() else folder / "tokenizer.json"
        refuse_special(folder)
        if not file.exists():
            raise ConfigError(_missing(folder))
        expressions = check_growth(file)
        try:
            backend = Backend.from_file(str(file))
            backend.encode("A probe: 12 words.\n")
        except BaseException as e:  # bare Exception for every kind of bad file, and a panic is not even that
            if not is_bug(e):
                raise
            raise ConfigError(
                f"{file} cannot be read as a tokenizer: {str(e)[:300]}. Download it again, or save it again with "
                "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            ) from e
        try_expressions(file, backend, expressions)
        config = {**read_object(folder / "special_tokens_map.json"), **read_object(folder / "tokenizer_config.json")}
        ends = end_ids(read_object(folder / "generation_config.json"), "generation_config.json")
        templates = templates_in(folder, config, chat_template)
        try:
            return cls(backend, config, templates, ends)
        except RequestError as e:
            raise ConfigError(f"{file} cannot be served: {e.message}") from e

    @property
    def eos_token_id(self) -> int | None:
        """The id of the EOS token, under transformers' name, or None."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        return self._backend.token_to_id(self.named_tokens[name]) if name in self.named_tokens else None

    # ------------------------------------------------------------------------------------------------------- plain text

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``. Raises RequestError for lone surrogates, which no encoding can hold.

        ``add_special``: add the BOS and other tokens that this tokenizer adds. ``parse_special``: read special-token
        strings in the text as those tokens; otherwise they are plain text.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not parse_special and not self._control_ids.isdisjoint(encoding.ids):
            encoding = self._plain.encode(text, add_special_tokens=False)
            if not self._control_ids.isdisjoint(encoding.ids):
                ids = self._broken(text, at_start=True)
                # This vocabulary spells special tokens as ordinary pieces: add what the tokenizer puts around "x".
                around = self._around if add_special else ([], [])
                return [*around[0], *ids, *around[1]]
        return (self._backend.post_process(encoding, None, True) if add_special else encoding).ids

    def prompt_ids(self, text: str, parse_special: bool | None = None, add_special: bool | None = None) -> list[int]:
        """Token ids of a raw prompt as ``transformers`` makes them, except that a BOS which begins the text is not
        added again. Both options default to true and are those of ``encode``. Raises RequestError."""
        parse, add = parse_special is not False, add_special is not False
        ids = self.encode(text, add, parse)
        before = self._around[0] if add and parse else []
        doubled = before and ids[: len(before)] == ids[len(before) : 2 * len(before)] == before
        return ids[len(before) :] if doubled else ids

    def encode_within(
        self, text: str, most: int | None, parse_special: bool = False, add_special: bool = True
    ) -> list[int]:
        """Token ids of ``text`` as in ``prompt_ids``, of a beginning of the text if there are more than ``most``."""
        ids = self.prompt_ids(text, parse_special, add_special)
        if most is None or len(ids) <= most:
            return ids
        before, after = self._around if add_special else ([], [])
        bare = self.encode(text, False, parse_special)
        if before and bare[: len(before)] == before:
            bare = bare[len(before) :]
        return [*before, *bare[: max(0, most - len(before) - len(after))], *after]

    def encode_pair(self, first: str, second: str, most: int | None = None) -> list[int]:
        """Token ids of two plain texts with what the tokenizer puts around a pair; the second text is cut where there
        are more than ``most``."""
        pair = [self._plain_encoding(text) for text in (first, second)]
        ids = self._backend.post_process(pair[0], pair[1], True).ids
        if most is not None and len(ids) > most:
            pair[1].truncate(max(0, len(pair[1].ids) - (len(ids) - most)))
            ids = self._backend.post_process(pair[0], pair[1], True).ids
        return ids

    def _plain_encoding(self, text: str) -> Encoding:
        """The encoding of a text whose control strings are plain text, without added tokens. Raises RequestError where
        the tokenizer cannot write them so."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        if self._control_ids.isdisjoint(encoding.ids):
            return encoding
        encoding = self._plain.encode(text, add_special_tokens=False)
        if self._control_ids.isdisjoint(encoding.ids):
            return encoding
        raise RequestError(
            "the text spells a special token that this tokenizer cannot write as plain text", code="special_token"
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``, the same as ``stream()`` gives piece by piece.
        Bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip=self.special_ids if skip_special else ())
        return stream.extend(ids) + stream.flush()

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not."""
        if self._codec is not None:
            # From the bytes: a second table of a vocabulary of 128k would take 15 MiB.
            data = self._bytes[token_id]
            return (data.removeprefix(b" ") if self._codec.strip else data).decode("utf-8", "replace")
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special=False)
        return text

    def stream(self, prompt_ids: Sequence[int] = (), skip: Collection[int] = ()) -> TextStream | WindowStream:
        """A stream that decodes the tokens after ``prompt_ids`` and leaves out the ids in ``skip``."""
        if self._codec is not None:
            return TextStream(self._bytes, self._codec.strip, prompt_ids, frozenset(skip))
        return WindowStream(self._backend, prompt_ids, frozenset(skip))

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, or None for an id outside of it."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self._backend.token_to_id(token)

    def is_added(self, token: str) -> bool:
        """Whether ``token`` is an added token (special or not), which never merges with other text."""
        return token in self._added

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text (``logprobs[].bytes``); empty for an id outside the vocabulary."""
        return self._bytes[token_id]

    # ------------------------------------------------------------------------------------------------------------- chat

    @property
    def chat_template(self) -> str | None:
        """The source of the default template, or None."""
        return self.templates["default"].source if "default" in self.templates else None

    def apply_chat_template(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tokenize: bool = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation as text. Raises RequestError 400.

        ``chat_template``: the name of one of the folder's templates, or a template sent by a client. ``tokenize``
        exists for scripts written for transformers and must be false. ``continue_final_message``: end the prompt where
        the text of the last message ends, so that the answer continues it. Other ``kwargs`` go to the template.
        """
        if tokenize:
            raise RequestError("apply_chat_template gives text; encode_chat gives its ids", param="tokenize")
        text, originals = self._render(
            messages, tools, add_generation_prompt, chat_template, kwargs, continue_final_message
        )
        return restore(text, originals)

    def encode_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        check: Callable[[Iterable[str]], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt of a conversation as ids. The template's special tokens are tokens; special-token strings of the
        user are plain text. ``check``: gets the rendered text before it is encoded, which takes a second a million
        characters. Raises RequestError 400, and what ``check`` raises."""
        text, originals = self._render(
            messages, tools, add_generation_prompt, chat_template, kwargs, continue_final_message
        )
        if check is not None:
            check([text])
        encoding = self._backend.encode(text, add_special_tokens=False)
        return self._reencode(text, encoding, originals) if originals else encoding.ids

    def _render(
        self,
        messages: list[dict],
        tools: list[dict] | None,
        add_generation_prompt: bool,
        chat_template: str | None,
        kwargs: dict[str, Any],
        continued: bool,
    ) -> tuple[str, dict[str, str]]:
        """The rendered text, and the control strings that its private characters stand for."""
        if bad := next((name for name in kwargs if name in RESERVED), None):
            raise RequestError(
                f"'{bad}' cannot be set through chat_template_kwargs",
                param="chat_template_kwargs",
                code="reserved_name",
            )
        template = self._template(chat_template, bool(tools))
        # A client's template runs in a process of its own, where nothing is tried first.
        parts = (
            isinstance(template, ChatTemplate)
            and any(isinstance(m.get("content"), list) for m in messages if isinstance(m, Mapping))
            and template.reads_parts
        )
        last = len(messages) - 1 if continued else -1
        messages = [normal(message, i, parts and i != last) for i, message in enumerate(messages)]
        end = unused([messages, tools, kwargs]) if continued else ""
        if continued:
            messages[-1]["content"] += end
            add_generation_prompt = False
        marks = Marks(self._control, self._tags, [messages, tools, kwargs])
        variables = {
            **self.named_tokens,
            **marks.of(kwargs, strict=True),
            "messages": [marks.of(m, strict=m["role"] in ("user", "tool")) for m in messages],
            "tools": marks.of(tools, strict=True) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        text = (
            template.render(variables) if isinstance(template, ChatTemplate) else render_isolated(template, variables)
        )
        if continued:
            text, found, _ = text.rpartition(end)
            if not found:
                raise RequestError(
                    "the chat template does not write the content of the last message, so it cannot be continued",
                    param="continue_final_message",
                    code="chat_template_error",
                )
        return text, marks.originals

    def renders_apart(self, wanted: str | None, with_tools: bool) -> bool:
        """Whether a chat template is rendered in a process of its own: a client's, or one that may not run here."""
        template = self._template(wanted, with_tools)
        return not isinstance(template, ChatTemplate) or template.apart

    def _template(self, wanted: str | None, with_tools: bool) -> ChatTemplate | str:
        if wanted is not None:
            if wanted in self.templates:
                return self.templates[wanted]
            if "{" not in wanted:
                raise RequestError(
                    f"no chat template is named '{wanted[:80]}'; the names are {', '.join(self.templates) or 'none'}."
                    f"{nearest(wanted[:80], self.templates)}",
                    param="chat_template",
                )
            return wanted
        name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise RequestError(
                "this model has no chat template. Start with --chat-template FILE (Jinja), or send the finished prompt "
                "to /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        return self.templates[name]

    def _reencode(self, text: str, encoding: Encoding, originals: dict[str, str]) -> list[int]:
        """The ids of ``text``, with the control strings of its private characters as plain text.

        text      <|im_start|>  user\\nhi ?there  <|im_end|>  \\n ...
        first ids     151644    . . . ? . . .      151645    . .      ? = a private character
        result        151644    encoded again      151645    kept
        """
        ids, offsets, result = encoding.ids, encoding.offsets, []
        private = re.compile("[" + "".join(originals) + "]")
        start = 0  # first token of the stretch, which ends before the template's next control token
        for end in [i for i, token in enumerate(ids) if token in self._control_ids] + [len(ids)]:
            left = offsets[start - 1][1] if start else 0
            right = offsets[end][0] if end < len(ids) else len(text)
            stretch = text[left:right]
            result += (
                self._plain_ids(restore(stretch, originals), left == 0) if private.search(stretch) else ids[start:end]
            )
            result += ids[end : end + 1]
            start = end + 1
        return result

    @functools.cached_property
    def _plain(self) -> Guarded:
        """The same tokenizer with every control token switched off, made when a text first needs it."""
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            token["special"] = token["id"] in self._control_ids
        plain = Backend.from_str(json.dumps(state))
        plain.encode_special_tokens = True
        plain.add_tokens([AddedToken(ANCHOR, special=False, normalized=False)])
        return Guarded(plain)

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        bare, full = self._backend.encode("x", add_special_tokens=False).ids, self._backend.encode("x").ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    def _plain_ids(self, text: str, at_start: bool) -> list[int]:
        ids = self._plain.encode(text if at_start else ANCHOR + text, add_special_tokens=False).ids[
            0 if at_start else 1 :
        ]
        return ids if self._control_ids.isdisjoint(ids) else self._broken(text, at_start)

    def _broken(self, text: str, at_start: bool) -> list[int]:
        """Ids of a text whose control strings are cut after their first character, so that no token can join them."""
        cuts = "|".join(
            f"(?<={re.escape(c[0])})(?={re.escape(c[1:])})" for c in longest_first(self._control) if len(c) > 1
        )
        ids: list[int] = []
        for i, piece in enumerate(re.split(cuts, text)):
            first = at_start and i == 0
            ids += self._plain.encode(piece if first else ANCHOR + piece, add_special_tokens=False).ids[
                0 if first else 1 :
            ]
        if not self._control_ids.isdisjoint(ids):
            raise RequestError(
                "the text spells a special token that this tokenizer cannot write as plain text", code="special_token"
            )
        return ids


# ---------------------------------------------------------------------------------------------------------------- files


def _missing(folder: Path) -> str:
    others = [
        n
        for n in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
        if (folder / n).exists()
    ]
    found = f"; it has {', '.join(others)}, which is an older format" if others else ""
    return (
        f"{folder} has no tokenizer.json{found}. Make one with transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r}); or point --tokenizer at a folder that has one. A server needs it; for "
        "token ids alone there is LLM(..., skip_tokenizer_init=True)."
    )


def _add_missing(backend: Guarded, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks. Raises ConfigError when they do not
    get the declared ids."""
    for token_id, token in added_tokens(config):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != token_id:
                raise ConfigError(
                    f"tokenizer_config.json gives token {token.content!r} the id {token_id}, but tokenizer.json "
                    f"leads to {backend.token_to_id(token.content)}. The two files do not belong together."
                )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [*named_tokens(config).values(), *extra_specials(config)]
    # A special token that is an ordinary word of the vocabulary would not be recognised in a template's text.
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in dict.fromkeys(named)
            if t not in known and backend.token_to_id(t) is not None
        ]
    )
