"""<think> tags that the prompt usually opens: an answer to an unknown prompt starts inside (DeepSeek-R1, QwQ)."""

from kvasir.api.calls.reasoning import ReasoningParser


class DeepSeekR1(ReasoningParser):
    """The parser of models whose prompt opens the thinking."""

    starts_inside = True
    marks = ("<｜Assistant｜>",)
