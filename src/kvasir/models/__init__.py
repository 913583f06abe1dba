"""Models: read a checkpoint and its config, build the decoder, load weights and tokenizer."""
