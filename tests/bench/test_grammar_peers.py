"""The schemas, values and walks of kvasir_lab/studies/grammar_peers.py. The peer is not installed here."""

from __future__ import annotations

import json
import random

from kvasir_lab.studies.grammar_peers import WORDS, Ours, drawn, timed, tokenizer


def test_values_are_allowed_and_spoiled_ones_are_seen():
    backend = tokenizer(400, [" ".join(WORDS), '{"name": "city", "unit": [1, 2, 3.5, true, false]}'] * 3)
    ours, rng, seen = Ours(backend), random.Random(3), 0
    for _ in range(20):
        schema, value = drawn(rng)
        text = json.dumps(schema)
        ids = backend.encode(json.dumps(value)).ids
        compiled, steps, wrong = timed(ours, text, ids)
        assert compiled > 0 and len(steps) == len(ids) - 1 and not wrong
        if value:
            spoiled = backend.encode(json.dumps({"none": 1, **value})).ids
            seen += timed(ours, text, spoiled)[2] > 0
    assert seen > 10, "a member that the schema does not name"
