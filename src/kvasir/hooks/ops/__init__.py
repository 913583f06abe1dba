"""The operations of hooks: each turns stored tensors into a move of hidden states. One file, one operation."""
