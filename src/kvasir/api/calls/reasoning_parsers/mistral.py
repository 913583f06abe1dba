"""[THINK] and [/THINK] around the thinking (Magistral, Ministral 3 Reasoning)."""

from kvasir.api.calls.reasoning import ReasoningParser


class Mistral(ReasoningParser):
    """The parser of models that open their thinking themselves, or whose prompt does."""

    start = "[THINK]"
    end = "[/THINK]"
