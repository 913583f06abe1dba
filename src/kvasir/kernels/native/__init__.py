"""Native kernels: C code for CPU decode steps and drafts, compiled on first use."""
