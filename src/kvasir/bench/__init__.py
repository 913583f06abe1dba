"""Benchmarks: cases, peers, workloads and the result files that every published figure comes from."""
