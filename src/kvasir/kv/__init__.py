"""The KV cache: the codec seam, and the pool that holds the bytes of all pages."""
