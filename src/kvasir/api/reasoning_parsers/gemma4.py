"""<|channel>thought and <channel|> around the thinking; a prompt without <|think|> asks for none (Gemma 4)."""

from kvasir.api.reasoning import ReasoningParser


class Gemma4(ReasoningParser):
    """The parser of models that open their thinking themselves. Some write an empty one when they should not think."""

    start = "<|channel>thought"
    end = "<channel|>"
    shown = ("<|channel>",)
    breaks = ("<|tool_call>",)
    switch = "<|think|>"
