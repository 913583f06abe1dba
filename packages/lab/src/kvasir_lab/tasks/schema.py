"""JSON records with named and typed fields: the reply must be one JSON object with exactly those fields.

The question lists the fields with their types ("name (string), age (integer)"), or gives values to copy. ``fields`` is
the dial.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.task import Problem, Split, Task

NAMES = """Alice Bella Clara Dora Emma Fanny Grace Hans Ida Jack Karl Lena Maria Nora Otto Paul Rosa Sam Tom Ursula
Victor Walter""".split()
CITIES = "Paris London Rome Berlin Oslo Vienna Madrid Lisbon Dublin Prague Athens Bergen Tokyo Cairo".split()
COLOURS = "red blue green yellow white black grey golden silver brown".split()
THINGS = "apple ring sword book lamp boat hat key bell cup rose stone coat horse cat dog bird fish fox wolf".split()
STRINGS = {
    "name": NAMES,
    "city": CITIES,
    "color": COLOURS,
    "title": THINGS,
    "friend": NAMES,
    "animal": THINGS,
    "kind": THINGS,
    "item": THINGS,
    "home": CITIES,
    "hair": COLOURS,
    "owner": NAMES,
    "answer": ["yes", "no"],
    "text": THINGS,
    "value": COLOURS,
}
INTEGERS = {
    "age": 100,
    "count": 20,
    "price": 200,
    "size": 50,
    "year": 2000,
    "number": 100,
    "id": 1000,
    "score": 100,
    "days": 31,
}
BOOLEANS = ("happy", "active", "rich", "done", "old", "valid")
LISTS = {"tags": COLOURS, "items": THINGS, "friends": NAMES, "pets": THINGS, "colors": COLOURS}
LIST_ASKS = (
    "Give me a JSON record with the fields {}.",
    "Write a JSON object with {}.",
    "Return JSON with the fields {}.",
    "Make a JSON record: {}.",
)
COPY_ASKS = ("Write this as JSON: {}.", "Make a JSON object of {}.", "Turn this into JSON: {}.")


@dataclass(frozen=True)
class Config:
    fields: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.fields <= 12:
            raise ConfigError(f"schema: fields={self.fields} must lie in 1..12")


def _value(rng: np.random.Generator, name: str) -> Any:
    if name in STRINGS:
        return STRINGS[name][rng.integers(len(STRINGS[name]))]
    if name in INTEGERS:
        return int(rng.integers(0, INTEGERS[name]))
    if name in BOOLEANS:
        return bool(rng.integers(2))
    choices = LISTS[name]
    return [choices[i] for i in rng.permutation(len(choices))[: rng.integers(1, 4)]]


def _words(value: Any) -> str:
    """A value as a sentence writes it."""
    return (
        " and ".join(value)
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


TYPES = {str: "string", int: "integer", bool: "boolean", list: "list of strings"}
ALL = (*STRINGS, *INTEGERS, *BOOLEANS, *LISTS)


class Schema(Task):
    """JSON records under random schemas."""

    pool = 12000

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        most = self.config.fields
        count = most + 1 if split == "longer" else int(rng.integers(1, most + 1))
        names = [ALL[i] for i in rng.permutation(len(ALL))[:count]]
        record = {name: _value(rng, name) for name in names}
        solution = json.dumps(record)
        if rng.random() < 0.5:
            listed = ", ".join(f"{name} ({TYPES[type(record[name])]})" for name in names)
            question, answer = LIST_ASKS[rng.integers(len(LIST_ASKS))].format(listed), ""
        else:
            listed = ", ".join(f"{name} {_words(value)}" for name, value in record.items())
            question, answer = COPY_ASKS[rng.integers(len(COPY_ASKS))].format(listed), solution
        answer = answer or json.dumps({n: TYPES[type(v)] for n, v in record.items()}) + "#types"
        return Problem(({"role": "user", "content": question},), solution, answer, count)

    def check(self, problem: Problem, reply: str) -> bool:
        record = _parse(reply)
        if not problem.answer.endswith("#types"):
            return record == json.loads(problem.answer)
        return _meets(record, json.loads(problem.answer.removesuffix("#types")))

    def tally(self, problem: Problem, reply: str) -> dict[str, int]:
        """Count ``valid``: the reply is JSON that meets the schema, whatever its values."""
        return {
            "valid": int(
                _meets(
                    _parse(reply), {name: TYPES[type(value)] for name, value in json.loads(problem.solution).items()}
                )
            )
        }

    def answer(self, reply: str) -> str | None:
        record = _parse(reply)
        return json.dumps(record, sort_keys=True) if isinstance(record, dict) else None

    def schema(self, problem: Problem) -> dict[str, Any]:
        """The JSON schema that a right reply meets, for constrained decoding."""
        kinds = {name: TYPES[type(value)] for name, value in json.loads(problem.solution).items()}
        fields = {
            n: {"type": "array", "items": {"type": "string"}} if kind.startswith("list") else {"type": kind}
            for n, kind in kinds.items()
        }
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _meets(record: Any, kinds: dict[str, str]) -> bool:
    """Whether ``record`` has exactly the fields of ``kinds``, each of its type."""
    return (
        isinstance(record, dict)
        and record.keys() == kinds.keys()
        and all(TYPES.get(type(record[n])) == kind for n, kind in kinds.items())
        and all(isinstance(i, str) for v in record.values() if isinstance(v, list) for i in v)
    )


def _parse(reply: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None
