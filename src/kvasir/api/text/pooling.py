"""The text side of embeddings and scores, shared by the server and the Python API: token ids of inputs and pairs, and
the likeness of two embeddings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvasir.errors import RequestError, nearest
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import Event, ModelInfo, Pooling

if TYPE_CHECKING:
    import numpy as np

# Names that clients send as ``input_type``, and the names of prompts that they may mean in a folder.
INPUT_TYPES = {
    "query": ("query", "search_query"),
    "search_query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "search_document": ("document", "passage", "search_document"),
}
# A chat template that makes the prompt of a pair names these roles.
_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


class PoolingText:
    """Token ids of what one pooling model reads."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        assert info.pooling is not None
        self.tokenizer, self.info = tokenizer, info
        self.pooling: Pooling = info.pooling
        source = tokenizer.chat_template or ""
        self._has_roles = all(role.search(source) for role in _ROLES)

    def prompt(self, prompt_name: str | None = None, input_type: str | None = None) -> str:
        """The folder's prompt of this name; the default one if none is named. Raises RequestError."""
        named = self.pooling.prompts
        if prompt_name is not None and input_type is not None:
            raise RequestError("send 'prompt_name' or 'input_type', not both", param="input_type")
        param, name = ("prompt_name", prompt_name) if input_type is None else ("input_type", input_type)
        if name is None:
            return named.get(self.pooling.default_prompt or "", "")
        for known in (name, *(INPUT_TYPES.get(name, ()) if param == "input_type" else ())):
            if known in named:
                return named[known]
        if named and param == "input_type" and "document" in INPUT_TYPES.get(name, ()):
            return ""  # most folders name a prompt for queries alone
        names = f"it names {', '.join(named)}.{nearest(name[:80], named)}" if named else "it names none"
        raise RequestError(
            f"the checkpoint names no prompt '{name[:80]}': {names}. You may write it into the text.",
            param=param,
        )

    def ids(
        self,
        text: str | list[int],
        prompt: str = "",
        most: int | None = None,
        parse_special: bool = False,
        add_special: bool = True,
    ) -> list[int]:
        """Token ids of one input with ``prompt`` before it, shortened to its first ``most``. Raises RequestError."""
        if not isinstance(text, str):
            return text if most is None else text[:most]
        return self.tokenizer.encode_within(prompt + text, most, parse_special, add_special)

    def pair_ids(self, query: str, document: str, instruction: str | None = None, most: int | None = None) -> list[int]:
        """Token ids of the prompt that a reranker scores; the document is cut where there are more than ``most``.

        A chat template with the roles query and document comes first, then the family's text, then the two texts in a
        row. A query that begins with the family's text was formatted by the client, as vLLM wants it. Raises
        RequestError.
        """
        template = self.pooling.template
        if self._has_roles:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            ids = self.tokenizer.encode_chat(messages)
            if most is not None and len(ids) > most:
                room = len(self.tokenizer.encode(document, add_special=False)) - (len(ids) - most)
                messages[-1]["content"] = self.cut(document, max(0, room))
                ids = self.tokenizer.encode_chat(messages)
            return self._within(ids, most)
        if instruction is not None and template is None:
            raise RequestError("this model's prompt has no instruction", param="instruction")
        if template is None:
            return self.tokenizer.encode_pair(query, document, most)
        if query.startswith(template.before):
            ids = self.tokenizer.encode(query + document, add_special=False, parse_special=True)
            return self._within(ids, most)
        before, after = (
            self.tokenizer.encode(part, add_special=False, parse_special=True)
            for part in (template.before, template.after)
        )
        asked = template.instruction if instruction is None else instruction
        pair = template.pair.format(instruction=asked, query=query, document=document)
        inner = self.tokenizer.encode(pair, add_special=False)
        if most is not None:
            inner = inner[: max(0, most - len(before) - len(after))]
        return [*before, *inner, *after]

    def _within(self, ids: list[int], most: int | None) -> list[int]:
        """The ids, whose end must not be cut. Raises RequestError."""
        if most is not None and len(ids) > most:
            raise RequestError(
                f"the prompt of the pair has {len(ids)} tokens, more than {most}, and cannot be cut; shorten the "
                "document",
                param="truncate_prompt_tokens",
                code="context_length_exceeded",
            )
        return ids

    def cut(self, text: str, most: int | None) -> str:
        """The beginning of a document of at most ``most`` tokens."""
        if most is None:
            return text
        ids = self.tokenizer.encode(text, add_special=False)
        return text if len(ids) <= most else self.tokenizer.decode(ids[:most], skip_special=False)


def vector(event: Event) -> np.ndarray:
    """The fp32 numbers of a pooled event."""
    import numpy as np

    assert event.pooled is not None
    return np.frombuffer(event.pooled, "<f4")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two embeddings, in fp64; 0 where one is zero."""
    import numpy as np

    a, b = a.astype(np.float64), b.astype(np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def paired(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[int, int]]:
    """Indices of the texts to compare: one with each, or each with the one at its place. Raises RequestError."""
    if not first or not second:
        empty = names[1] if first else names[0]
        raise RequestError(f"'{empty}' is empty", param=empty)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{len(first)} and {len(second)} texts cannot be compared: '{names[0]}' must hold one text, or as many as "
            f"'{names[1]}'",
            param=names[0],
        )
    return [(i if len(first) > 1 else 0, i) for i in range(len(second))]
