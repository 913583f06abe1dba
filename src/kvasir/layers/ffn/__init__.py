"""Feed-forward layers, dense and mixture-of-experts. One file, one kind."""
