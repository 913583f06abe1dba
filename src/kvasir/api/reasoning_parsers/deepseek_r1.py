"""<think> tags that the prompt usually opens: an answer to an unknown prompt starts inside (DeepSeek-R1, QwQ)."""

from kvasir.api.reasoning import ReasoningParser


class DeepSeekR1(ReasoningParser):
    starts_inside = True
