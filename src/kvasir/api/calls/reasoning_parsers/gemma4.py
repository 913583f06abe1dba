"""<|channel>thought and <channel|> around the thinking; a prompt without <|think|> asks for none (Gemma 4)."""

from kvasir.api.calls import call_openings
from kvasir.api.calls.growing import Growing, spelled
from kvasir.api.calls.reasoning import ReasoningParser


class Gemma4(ReasoningParser):
    """The parser of models that open their thinking themselves. Some write an empty one when they should not think."""

    start = "<|channel>thought"
    end = "<channel|>"
    shown = ("<|channel>",)
    breaks = Growing(spelled("<|tool_call>"), *call_openings.ALL)
    switch = "<|think|>"
