"""Bodies of /v1/embeddings, /v1/score and the rerank routes; see ``protocol`` for how bodies are read."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.api.http.body import PROMPT, Body, Strings, prompts

# Most texts in a request, as at OpenAI.
MAX_TEXTS = 2048

Inputs = Annotated[list[Any], BeforeValidator(partial(prompts, most=MAX_TEXTS)), WithJsonSchema(PROMPT)]


def _documents(value: Any) -> Any:
    """Turn documents, texts or objects with a ``text``, into a list of texts."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("documents", "must be a non-empty list of strings, or of objects with a 'text'")
    if len(value) > MAX_TEXTS:
        raise PydanticCustomError("documents", f"holds {len(value)} documents; at most {MAX_TEXTS} fit in a request")
    texts = [d.get("text") if isinstance(d, dict) and set(d) == {"text"} else d for d in value]
    if bad := next((i for i, text in enumerate(texts) if not isinstance(text, str)), -1) + 1:
        raise PydanticCustomError("documents", f"holds something that is neither text nor {{'text': ...}} at {bad - 1}")
    return texts


_DOCUMENT = {"type": "object", "required": ["text"], "additionalProperties": False}
_DOCUMENT["properties"] = {"text": {"type": "string"}}
DOCUMENTS = {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _DOCUMENT]}}
Documents = Annotated[list[str], BeforeValidator(_documents), WithJsonSchema(DOCUMENTS)]


class PoolingBody(Body):
    """The parameters that all routes of pooling models share.

    ``truncate_prompt_tokens``: keep the beginning of longer prompts, with the tokens that the tokenizer adds; -1: as
    many tokens as the context holds. ``use_activation`` (or ``normalize``): as in ``types.PoolingParams``.
    """

    priority: int | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    use_activation: bool | None = None


class EmbeddingsBody(PoolingBody):
    input: Inputs
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    normalize: bool | None = None


class RerankBody(PoolingBody):
    query: str
    documents: Documents
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1)
    instruction: str | None = None


class ScoreBody(PoolingBody):
    """One text against one or many, or as many against as many. vLLM has two pairs of names."""

    text_1: Strings = None
    text_2: Strings = None
    queries: Strings = None
    documents: Strings = None
    instruction: str | None = None
