"""Models as files and as data: checkpoints, configs, families, loading, tokenizers, and the decoder that runs them."""
