"""Kernels: one operation a file, with its plain reference, its Triton kernel, its chooser and its test grid."""
