"""<think> tags that the model or the prompt opens; without them the whole answer is content (Qwen3, GLM-4.5)."""

from kvasir.api.calls.reasoning import ReasoningParser


class Qwen3(ReasoningParser):
    """The parser of models that open their thinking themselves, or whose prompt does."""

    also = ("glm45",)
