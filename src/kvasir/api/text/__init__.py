"""Between messages and token ids: templates, prompts, and the text of tokens that come back."""
