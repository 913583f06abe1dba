"""The protocols that clients speak: OpenAI's chat, completions and responses, Anthropic's messages, and pooling."""
