"""Input items of the responses API as chat messages."""

from __future__ import annotations

import pytest

from kvasir.api.protocols.responses import messages_of
from kvasir.errors import RequestError

ASK = {"role": "user", "content": "hi"}


def test_reasoning_belongs_to_what_follows_it():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert messages_of([ASK, thought, {"role": "assistant", "content": "ho"}], None)[1:] == [
        {"role": "assistant", "content": "ho", "reasoning_content": "hm"}
    ]


@pytest.mark.parametrize("more", [{}, {"encrypted_content": "x", "content": None}])
def test_reasoning_without_text_is_no_message(more):
    item = {"type": "reasoning", "summary": [], **more}
    assert messages_of([ASK, item, {"role": "assistant", "content": "ho"}, item, ASK], None) == [
        ASK,
        {"role": "assistant", "content": "ho"},
        ASK,
    ]
    with pytest.raises(RequestError) as e:
        messages_of([item], None)
    assert e.value.param == "input"
