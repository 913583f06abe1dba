"""Pages of the cache: who holds them, which prefixes they are, and the states of recurrent layers."""
