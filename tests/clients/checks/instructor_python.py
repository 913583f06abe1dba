"""instructor: typed answers by tools, by JSON schema and by JSON mode."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel

CAT = [{"role": "user", "content": "Once upon a time there was a cat"}]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    small: bool


def create(url, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model="nano", messages=CAT, response_model=Animal, max_retries=0, max_tokens=64, temperature=0
    )


def check_tools(url):
    assert create(url, instructor.Mode.TOOLS).kind in ("cat", "dog")


def check_json_schema(url):
    assert create(url, instructor.Mode.JSON_SCHEMA).kind in ("cat", "dog")
